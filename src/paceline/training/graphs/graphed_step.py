"""Step that is replayed from CUDA graphs, after a trial that compares it with steps without them."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from paceline.errors import WorkloadError
from paceline.formatting import short
from paceline.measure.steps import BACKWARD, DATA, FORWARD
from paceline.records.events import CudaGraphEvent
from paceline.training.graphs.capture import CAPTURERS, CaptureError
from paceline.training.graphs.passes import PassGraphs, StaticGradients, form_of
from paceline.training.graphs.trial import (
    STEPS,
    TOLERANCES,
    Snapshot,
    TrialStep,
    difference_of_losses,
    difference_of_updates,
)
from paceline.training.graphs.update import UpdateGraphs, prepare_for_capture
from paceline.training.precision import autocast
from paceline.training.step import TrainingStep
from paceline.workloads.batches import MicroBatch
from paceline.workloads.workload import ForwardResult

PassKey = Any
"""Form of a micro-batch, its weight, and whether it is the first of its step."""


class GraphedStep(TrainingStep):
    """Step of a run that replays CUDA graphs as soon as a trial has shown that they compute the same.

    The first step of the run prepares kernels and the optimiser's state. The next three are the trial's. At the end of
    their window, outside of all measured times, the graphs are captured and train these steps again. Micro-batches of a
    form that was never seen, such as the last of an epoch, are trained without graphs once, and captured at the end of
    their window.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        prepare_for_capture(self.sync.optimizer)
        self._steps = 0
        self._before: Snapshot | None = None
        self._trial: list[TrialStep] = []
        self._eager: list[Tensor] = []
        """Weights after the steps of the trial, which were trained without graphs."""
        self._is_decided = self._uses_graphs = self._is_attached = False
        self._passes: dict[PassKey, PassGraphs | None] = {}
        """Graphs by the form of a micro-batch; None if it cannot be captured, and is trained without."""
        self._missing: dict[PassKey, tuple[MicroBatch, Any]] = {}
        """Micro-batches without a graph that were trained since the last window."""
        device = self.source.share.device
        self._capturer = CAPTURERS[device.type](device)
        self._gradients = StaticGradients([parameter for _, parameter in self.sync.strategy.parameters])
        self._updates = UpdateGraphs(self._capturer, self.sync.optimizer, self.sync.strategy.apply_update)

    # Steps.

    def run(self, micro_batches: list[MicroBatch]) -> bool:
        self._steps += 1
        if self._uses_graphs:
            return self._run_with_graphs(micro_batches)
        if not self._is_decided and self._steps > 1 and len(self._trial) < STEPS:
            return self._run_trial_step(micro_batches)
        return super().run(micro_batches)

    def _run_trial_step(self, micro_batches: list[MicroBatch]) -> bool:
        """Train a step without graphs, and keep what is needed to train it again."""
        if self._before is None:
            self._before = self._snapshot()
        step = TrialStep([float(group["lr"]) for group in self.sync.optimizer.param_groups])
        for number, micro_batch in enumerate(micro_batches, start=1):
            batch = self.source.fetch(micro_batch)
            step.passes.append((micro_batch, batch))
            step.losses.append(self.run_pass(micro_batch, batch, last=number == len(micro_batches)))
        is_skipped = self.update()
        self._trial.append(step)
        if len(self._trial) == STEPS:
            self._eager = [weight.clone() for weight in self._weights]
        return is_skipped

    def _run_with_graphs(self, micro_batches: list[MicroBatch]) -> bool:
        fetched = [(micro_batch, self.source.fetch(micro_batch)) for micro_batch in micro_batches]
        keys = [_key(*one, is_first=number == 0) for number, one in enumerate(fetched)]
        passes = [graphs for key in keys if (graphs := self._passes.get(key)) is not None]
        if len(passes) < len(fetched):
            self._missing |= {key: one for key, one in zip(keys, fetched, strict=True) if key not in self._passes}
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
        self._passes.clear()

    # Captures and the trial, between two windows.

    def between_windows(self) -> None:
        if self._uses_graphs:
            self._capture_missing()
        elif not self._is_decided and len(self._trial) == STEPS:
            self._decide()

    def _capture_missing(self) -> None:
        """Capture forms of micro-batches that appeared in the last window; one that fails is never tried again."""
        for key, (micro_batch, batch) in self._missing.items():
            try:
                self._passes[key] = self._captured(micro_batch, batch, is_first=key[-1])
            except CaptureError:
                self._passes[key] = None
        if self._missing:
            self._detach()
        self._missing.clear()

    def _decide(self) -> None:
        """Train the steps of the trial again, with graphs; all ranks use them, or none."""
        started_s = time.perf_counter()
        self._is_decided = True
        after, reason = self._snapshot(), ""
        try:
            reason = self._try_graphs(after)
        except CaptureError as error:
            reason = str(error)
        finally:
            self._detach()
            after.restore()
        agreed = self.sync.comm.control.smallest(int(not reason)) == 1
        reason = reason or ("" if agreed else "they differ on another rank.")
        self._before, self._trial, self._eager, self._uses_graphs = None, [], [], agreed
        if not agreed:
            self._passes.clear()
            if self.config.cuda_graph == "on":
                raise WorkloadError(
                    f"--cuda-graph on was given, but {reason}", hint="use --cuda-graph auto, or off; see docs/gpu.md"
                )
        self.write_event(CudaGraphEvent(used=agreed, reason=reason, took_s=time.perf_counter() - started_s))

    def _try_graphs(self, after: Snapshot) -> str:
        """Train the steps of the trial again; return why graphs cannot be used, as the end of a sentence, or ""."""
        before, tolerance = self._before, TOLERANCES[self.config.precision]
        assert before is not None, "the trial began with a snapshot"
        if before.numbers != after.numbers:
            return "the optimiser counts its steps in Python, which a graph does not run."
        weights, eager = self._weights, self._eager
        before.restore()
        start = [weight.clone() for weight in weights]
        losses = list[Tensor]()
        for step in self._trial:
            self._updates.load_rates(step.rates)
            losses += self._train_again(step)
        by_loss = difference_of_losses(losses, [loss for step in self._trial for loss in step.losses])
        if by_loss > tolerance.loss:
            return f"the losses of {STEPS} steps differ by up to {short(by_loss, 2)} of those without graphs."
        by_update = difference_of_updates(start, eager, weights)
        if by_update > tolerance.update:
            return f"the updates of {STEPS} steps differ by {short(by_update, 2)} of those without graphs."
        if not self._reads_rate():
            return "the optimiser does not read the learning rate from a tensor."
        return ""

    def _reads_rate(self) -> bool:
        """Return whether another learning rate makes another update; changes the weights."""
        state, updated = self._snapshot(), list[list[Tensor]]()
        for rate in (0.1, 0.2):
            state.restore()
            self._updates.replay_with_rate(rate)
            updated.append([weight.clone() for weight in self._weights])
        return any(not torch.equal(one, two) for one, two in zip(*updated, strict=True))

    def _train_again(self, step: TrialStep) -> list[Tensor]:
        """Train a step of the trial with graphs, which are captured where they are missing; return its losses."""
        losses = list[Tensor]()
        for number, (micro_batch, batch) in enumerate(step.passes):
            key = _key(micro_batch, batch, is_first=number == 0)
            graphs = self._passes.get(key) or self._captured(micro_batch, batch, is_first=number == 0)
            self._passes[key] = graphs
            self.sync.refresh_buffers()
            graphs.load(batch)
            graphs.forward()
            losses.append(graphs.figures[0].clone())
            graphs.backward()
        self._attach()
        groups = self.sync.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, step.rates, strict=True):
            group["lr"] = rate
        self.sync.trial_step(self.config.clip_norm)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        return losses

    def _captured(self, micro_batch: MicroBatch, batch: Any, *, is_first: bool) -> PassGraphs:
        self.sync.refresh_buffers()  # So that the model's hook sends nothing while it is captured.
        return PassGraphs(
            self._capturer, self._forward, self._gradients, batch, weight=micro_batch.weight, is_first=is_first
        )

    def _forward(self, batch: Any) -> tuple[ForwardResult, Tensor | None]:
        with (
            autocast(self.config.precision, self.source.share.device, keeps_casts=False),
            self.forward_context(batch),
        ):
            outcome = self.workload.forward(self.model, batch)
        return outcome, self.workload.count_correct(outcome)

    @property
    def _weights(self) -> list[Tensor]:
        return [parameter.detach() for _, parameter in self.sync.strategy.parameters]

    def _snapshot(self) -> Snapshot:
        return Snapshot(self.sync.strategy.model, self.sync.optimizer, self.source.share.device)


def _key(micro_batch: MicroBatch, batch: Any, *, is_first: bool) -> PassKey:
    return form_of(batch), micro_batch.weight, is_first
