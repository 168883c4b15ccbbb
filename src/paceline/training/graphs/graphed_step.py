"""Step that is replayed from CUDA graphs, after a trial that compares it with steps without them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.errors import WorkloadError
from paceline.formatting import short
from paceline.measure.steps import BACKWARD, DATA, FORWARD
from paceline.records.events import CudaGraphEvent
from paceline.training.graphs.capture import CAPTURERS, CaptureError
from paceline.training.graphs.host_state import HostState
from paceline.training.graphs.passes import PassGraphs, StaticGradients, form_of, form_of_tensors
from paceline.training.graphs.trial import (
    STEPS,
    TOLERANCES,
    Snapshot,
    TrialStep,
    difference_of_losses,
    difference_of_updates,
    tensors_that_passes_change,
    tensors_that_steps_change,
)
from paceline.training.graphs.update import UpdateGraphs, prepare_for_capture
from paceline.training.precision import autocast
from paceline.training.step import TrainingStep
from paceline.workloads.batches import MicroBatch
from paceline.workloads.workload import ForwardResult

PassKey = Any
"""Form of a micro-batch, its weight, and whether it is the first of its step."""
MOST_FORMS = 16
"""Most forms of micro-batches that are captured."""
NO_MEMORY = "the GPU has too little free memory for a trial."


class GraphedStep(TrainingStep):
    """Step of a run that replays CUDA graphs as soon as a trial has shown that they compute the same.

    The first step of the run prepares kernels and the optimiser's state. The next three are the trial's. At the end of
    their window, outside of all measured times, the graphs are captured and train these steps again. Micro-batches of a
    form that was never seen, such as the last of an epoch, are trained without graphs once, and captured at the end of
    their window. Steps whose gradient noise is measured are trained without graphs, because replays run no hooks.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._take_back_choice = prepare_for_capture(self.sync.optimizer)
        self._steps = 0
        self._refusal = ""
        """Reason against graphs that the steps of the trial have found, as the end of a sentence."""
        self._before: Snapshot | None = None
        self._trial: list[TrialStep] = []
        self._start: list[Tensor] = []
        """Weights before the steps of the trial."""
        self._eager: list[Tensor] = []
        """Weights after the steps of the trial, which were trained without graphs."""
        self._is_decided = self._uses_graphs = self._is_attached = False
        self._passes: dict[PassKey, PassGraphs | None] = {}
        """Graphs by the form of a micro-batch; None if it cannot be captured, and is trained without."""
        self._missing: dict[PassKey, tuple[MicroBatch, Any]] = {}
        """Micro-batches without a graph that were trained since the last window."""
        self._has_too_many_forms = False
        device = self.source.share.device
        self._capturer = CAPTURERS[device.type](device)
        self._gradients = StaticGradients([parameter for _, parameter in self.sync.strategy.parameters])
        self._updates = UpdateGraphs(self._capturer, self.sync.optimizer, self.sync.strategy.apply_update)

    # Steps.

    def run(self, micro_batches: list[MicroBatch]) -> bool:
        self._steps += 1
        if self._uses_graphs and self.sync.noise.is_measuring:
            self._detach()
            return super().run(micro_batches)
        if self._uses_graphs:
            return self._run_with_graphs(micro_batches)
        if not self._is_decided and self._steps > 1 and len(self._trial) < STEPS:
            return self._run_trial_step(micro_batches)
        return super().run(micro_batches)

    def _run_trial_step(self, micro_batches: list[MicroBatch]) -> bool:
        """Train a step without graphs, and keep what is needed to train it again."""
        if self._before is None and not self._refusal:
            self._refusal = self._why_no_memory(self._keep_start)
        step = TrialStep([_settings(group) for group in self.sync.optimizer.param_groups])
        self._trial.append(step)
        for number, micro_batch in enumerate(micro_batches, start=1):
            batch = self.source.fetch(micro_batch)
            step.passes.append((micro_batch, batch))
            state = self._host_state()
            step.losses.append(self.run_pass(micro_batch, batch, last=number == len(micro_batches)))
            self._refusal = self._refusal or state.why_not_captured(self._host_state())
        state = self._host_state()
        is_skipped = self.update()
        self._refusal = self._refusal or state.why_not_captured(self._host_state())
        if len(self._trial) == STEPS and not self._refusal:
            self._refusal = _why_forms_differ(self._trial) or self._why_no_memory(self._keep_eager)
        return is_skipped

    def _keep_start(self) -> None:
        self._before, self._start = self._snapshot(), self._copied_weights()

    def _keep_eager(self) -> None:
        self._eager = self._copied_weights()

    def _run_with_graphs(self, micro_batches: list[MicroBatch]) -> bool:
        fetched = [(micro_batch, self.source.fetch(micro_batch)) for micro_batch in micro_batches]
        keys = [_key(*one, is_first=number == 0) for number, one in enumerate(fetched)]
        passes = [graphs for key in keys if (graphs := self._passes.get(key)) is not None]
        if len(passes) < len(fetched):
            for key, one in zip(keys, fetched, strict=True):
                if key not in self._passes and len(self._missing) < MOST_FORMS:
                    self._missing[key] = one
            self._detach()
            for number, (micro_batch, batch) in enumerate(fetched, start=1):
                self.run_pass(micro_batch, batch, last=number == len(fetched))
            return self.update()
        self._attach()
        for (micro_batch, batch), graphs in zip(fetched, passes, strict=True):
            graphs.load(batch)
            self.stopwatch.lap(DATA)
            self.sync.refresh_buffers()
            graphs.forward()
            figures = graphs.figures.clone()  # The next step overwrites them before they are read.
            self.recorder.add_micro_batch(
                micro_batch.samples, figures[0], figures[1] if graphs.counts_correct else None
            )
            self.stopwatch.lap(FORWARD)
            graphs.backward()
            self.stopwatch.lap(BACKWARD)
        return self.update()

    def _replay_update(self, max_norm: float | None) -> None:
        self.stopwatch.mark_agreed()
        self._updates.run(max_norm)

    def _attach(self) -> None:
        """Let the strategy update the weights by a graph, from the memory that graphs write gradients to."""
        if not self._is_attached:
            self._gradients.attach()
            self.sync.strategy.replay_update = self._replay_update
            self._is_attached = True

    def _detach(self) -> None:
        self._gradients.detach()
        self.sync.strategy.replay_update = None
        self._is_attached = False

    def close(self) -> None:
        if self._uses_graphs:
            self._detach()
        self._release()

    def _release(self) -> None:
        """Give back the memory of graphs and of the trial."""
        self._passes.clear()
        self._missing.clear()
        self._gradients.tensors.clear()
        self._updates.clear()
        self._end_trial()

    def _end_trial(self) -> None:
        self._before, self._trial, self._start, self._eager = None, [], [], []

    # Captures and the trial, between two windows.

    def between_windows(self) -> None:
        is_decision = not self._is_decided and len(self._trial) == STEPS
        if is_decision or (self._uses_graphs and (self._missing or self._updates.has_missing)):
            with self.recording.capturing_graphs():
                (self._decide if is_decision else self._capture_missing)()

    def _capture_missing(self) -> None:
        """Capture what appeared without a graph in the last window; a form that fails is never tried again."""
        for key, (micro_batch, batch) in self._missing.items():
            if len(self._passes) == MOST_FORMS:
                self._report_too_many_forms()
                break
            try:
                self._passes[key] = self._captured(micro_batch, batch, is_first=key[-1])
            except (CaptureError, torch.OutOfMemoryError):
                self._passes[key] = None
        self._missing.clear()
        self._gradients.attach()
        self._updates.capture_missing()
        self._detach()

    def _report_too_many_forms(self) -> None:
        if not self._has_too_many_forms:
            self._has_too_many_forms = True
            reason = f"micro-batches have more than {MOST_FORMS} forms, and the others are trained without."
            self.recording.write_event(CudaGraphEvent(used=True, reason=reason))

    def _decide(self) -> None:
        """Train the steps of the trial again, with graphs; all ranks use them, or none."""
        started_s = time.perf_counter()
        self._is_decided = True
        after: Snapshot | None = None
        reason = self._refusal
        try:
            if not reason:
                after = self._snapshot()
                self._capture_trial()
        except CaptureError as error:
            reason = str(error)
        except torch.OutOfMemoryError:
            reason = NO_MEMORY
        # Ranks exchange gradients in the steps that follow, so all of them make these steps, or none.
        if self._is_agreed(not reason):
            losses = self._train_trial_again()
            reason = self._why_no_memory(lambda: self._compare(losses)) or self._refusal
        self._detach()
        if after is not None:
            after.restore()
        agreed = self._is_agreed(not reason)
        if self.sync.payload is not None:  # What the trial sends does not belong to the next window.
            self.sync.payload.close_window(0, counts=False)
        reason = reason or ("" if agreed else "they cannot be used on another rank.")
        self._uses_graphs = agreed
        self._end_trial()
        if agreed:
            self.sync.noise.begin_replays()
        else:
            self._release()
            self._take_back_choice()
            if self.config.cuda_graph == "on":
                raise WorkloadError(
                    f"--cuda-graph on was given, but {reason}", hint="use --cuda-graph auto, or off; see docs/gpu.md"
                )
        self.recording.write_event(CudaGraphEvent(used=agreed, reason=reason, took_s=time.perf_counter() - started_s))

    def _is_agreed(self, is_fine: bool) -> bool:
        """Return whether something holds on all ranks."""
        return self.sync.comm.control.smallest(int(is_fine)) == 1

    def _capture_trial(self) -> None:
        """Capture all graphs of the trial's steps; changes the weights."""
        for step in self._trial:
            for number, (micro_batch, batch) in enumerate(step.passes):
                key = _key(micro_batch, batch, is_first=number == 0)
                if key not in self._passes:
                    self._passes[key] = self._captured(micro_batch, batch, is_first=number == 0)
        self._gradients.attach()
        self._updates.capture(self.config.clip_norm)

    def _train_trial_again(self) -> list[Tensor]:
        """Train the steps of the trial with graphs, from the same state, on all ranks; return their losses."""
        assert self._before is not None, "the trial began with a snapshot"
        self._before.restore()
        return [loss for step in self._trial for loss in self._train_again(step)]

    def _compare(self, losses: list[Tensor]) -> None:
        """Set the reason why graphs cannot be used, given their losses; changes the weights."""
        before, tolerance = self._before, TOLERANCES[self.config.precision]
        assert before is not None, "the trial began with a snapshot"
        by_loss = difference_of_losses(losses, [loss for step in self._trial for loss in step.losses])
        by_update = difference_of_updates(self._start, self._eager, self._weights)
        if by_loss > tolerance.loss:
            self._refusal = f"the losses of {STEPS} steps differ by up to {short(by_loss, 2)} of those without graphs."
        elif by_update > tolerance.update:
            self._refusal = f"the updates of {STEPS} steps differ by {short(by_update, 2)} of those without graphs."
        elif not self._reads_rate(before):
            self._refusal = "the optimiser does not read the learning rate from a tensor."

    def _reads_rate(self, before: Snapshot) -> bool:
        """Return whether another learning rate makes another update in each parameter group; changes the weights."""
        self._eager.clear()
        before.restore()
        self._updates.replay_with_rate(0.1)
        one = {id(weight): weight.clone() for weight in self._weights}
        start = {id(weight): value for weight, value in zip(self._weights, self._start, strict=True)}
        before.restore()
        self._updates.replay_with_rate(0.2)
        for group in self.sync.optimizer.param_groups:
            own = [parameter for parameter in group["params"] if id(parameter) in one]
            is_updated = any(not torch.equal(parameter, start[id(parameter)]) for parameter in own)
            if is_updated and all(torch.equal(parameter, one[id(parameter)]) for parameter in own):
                return False
        return True

    def _train_again(self, step: TrialStep) -> list[Tensor]:
        """Train a step of the trial with graphs; return its losses."""
        losses = list[Tensor]()
        for number, (micro_batch, batch) in enumerate(step.passes):
            graphs = self._passes[_key(micro_batch, batch, is_first=number == 0)]
            assert graphs is not None, "all passes of the trial were captured"
            self.sync.refresh_buffers()
            graphs.load(batch)
            graphs.forward()
            losses.append(graphs.figures[0].clone())
            graphs.backward()
        self._attach()
        groups = self.sync.optimizer.param_groups
        present = [dict(group) for group in groups]
        for group, settings in zip(groups, step.settings, strict=True):
            group.update(settings)
        self.sync.trial_step(self.config.clip_norm)
        for group, settings in zip(groups, present, strict=True):
            group.update(settings)
        return losses

    def _captured(self, micro_batch: MicroBatch, batch: Any, *, is_first: bool) -> PassGraphs:
        kept = Snapshot(tensors_that_passes_change(self.sync.strategy.model), self.source.share.device)
        try:
            with self.sync.local_passes():  # Other ranks may have nothing to capture.
                return PassGraphs(
                    self._capturer, self._forward, self._gradients, batch, weight=micro_batch.weight, is_first=is_first
                )
        finally:
            kept.restore()  # The rehearsal has changed them.

    def _forward(self, batch: Any) -> tuple[ForwardResult, Tensor | None]:
        with (
            autocast(self.config.precision, self.source.share.device, keeps_casts=False),
            self.forward_context(batch),
        ):
            outcome = self.workload.forward(self.model, batch)
        return outcome, self.workload.count_correct(outcome)

    @property
    def _weights(self) -> list[Tensor]:
        return [parameter for _, parameter in self.sync.strategy.parameters]

    def _copied_weights(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self._weights]

    def _snapshot(self) -> Snapshot:
        tensors = tensors_that_steps_change(self.sync.strategy.model, self.sync.optimizer)
        return Snapshot(tensors, self.source.share.device)

    def _host_state(self) -> HostState:
        return HostState(self.sync.strategy.model, self.sync.optimizer, self.source.share.device)

    def _why_no_memory(self, work: Callable[[], None]) -> str:
        """Do work that takes memory for the trial; return the reason against graphs if there is not enough, else ""."""
        try:
            work()
        except torch.OutOfMemoryError:
            self._before, self._start, self._eager = None, [], []
            return NO_MEMORY
        return ""


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group; the value of a learning rate that is a tensor."""
    return {name: value for name, value in group.items() if name != "params"} | {"lr": float(group["lr"])}


def _key(micro_batch: MicroBatch, batch: Any, *, is_first: bool) -> PassKey:
    return form_of(batch), micro_batch.weight, is_first


def _why_forms_differ(trial: list[TrialStep]) -> str:
    """Return the reason against graphs if batches differ in values that are not tensors, which graphs contain."""
    keys: dict[Any, PassKey] = {}
    for step in trial:
        for number, (micro_batch, batch) in enumerate(step.passes):
            try:
                key = _key(micro_batch, batch, is_first=number == 0)
            except CaptureError as error:
                return str(error)
            if keys.setdefault((form_of_tensors(batch), *key[1:]), key) != key:
                return "batches contain values that are not tensors and differ from step to step."
    return ""
