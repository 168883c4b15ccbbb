"""Measures the loop of a script: the same record as of a run of ours, from the calls that the script makes anyway."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm import Comm
from paceline.config import BatchNormMode
from paceline.errors import WorkloadError
from paceline.measure.cores import core_share
from paceline.measure.memory import peak_bytes, reset_peak
from paceline.measure.profiler import StepProfiler
from paceline.measure.run_monitor import RunMonitor
from paceline.measure.slow_rank import stopwatch_for
from paceline.measure.steps import AGREE, BACKWARD, DATA, FORWARD, OPTIMISER, Stopwatch
from paceline.strategies.base.strategy import MakeOptimizer, Strategy
from paceline.training import results
from paceline.training.clock_sync import start_together
from paceline.training.placement import Placement
from paceline.training.run_recorder import RunRecorder
from paceline.training.scripts.script_task import ScriptTask, TaskSync
from paceline.training.step_recorder import StepRecorder
from paceline.training.tensorboard import TensorBoardWriter
from paceline.training.topology import describe_model, describe_place, describe_strategy
from paceline.training.windows import Windows

EPOCH = 0
"""Which epoch a script is in is its own affair."""


class TimingTask(ScriptTask):
    """Asks for a record of so many steps."""

    @property
    def steps(self) -> int:
        assert self.config.steps is not None, "compare gives scripts a number of steps"
        return self.config.steps

    def stopwatch(self, device: torch.device) -> Stopwatch:
        factor = self.config.slowed.get(dist.get_rank(), 1.0)
        share = core_share(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.get_num_threads())
        return stopwatch_for(device, events=self.config.events, factor=factor, core_share=share)

    def make_sync(
        self, model: nn.Module, make_optimizer: MakeOptimizer, strategy: Strategy, comm: Comm, bn: BatchNormMode
    ) -> TaskSync:
        return TimedSync(self, model, make_optimizer, strategy, comm, bn)


@dataclass(frozen=True)
class StepNote:
    """What a script tells of a step, or of a micro-batch of it."""

    loss: Tensor | float | None
    samples: int | None
    correct: Tensor | int | None


class TimedSync(TaskSync):
    """A `Sync` that times the script's steps and keeps their figures.

    A step lasts from the end of the one before to the end of `step()`. What comes before its first forward pass is
    data, what lies between the passes of `sync.model` is backward, the loss included. Passes without gradients are not
    part of training.
    """

    def __init__(
        self,
        assignment: TimingTask,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        strategy: Strategy,
        comm: Comm,
        bn: BatchNormMode,
    ) -> None:
        self._peak_is_ours = reset_peak(comm.device)
        super().__init__(assignment.steps, model, make_optimizer, strategy, comm, bn)
        self._strategy_text = assignment.config.strategy
        assert comm.stopwatch is not None
        self._stopwatch = comm.stopwatch
        start_together(comm)
        self._account = RunRecorder(assignment.folder, comm.rank, self._stopwatch.clock.now)
        self._undo.callback(self._account.close)
        if comm.rank == 0:
            config = replace(assignment.config, bn=bn, allow_unused=strategy.allow_unused)
            settings = assignment.script.settings_to_keep(config)
            topology = _topology(assignment, model, strategy, comm)
            self._account.describe(settings, topology, assignment.command)
        timeline = self._account.timeline if assignment.config.events else None
        self._ledger = StepRecorder(self._stopwatch, self._account.steps, timeline)
        profiled = assignment.config.profiled_steps
        profiler = StepProfiler(profiled, assignment.folder, comm.rank, comm.device) if profiled else None
        self._windows = Windows(self, self._ledger, assignment.config.log_every, self._account.report, profiler)
        first_on_host = int(os.environ.get("LOCAL_RANK", comm.rank)) == 0
        self._watch = RunMonitor(
            assignment.folder, comm.rank, self._stopwatch.clock.now, comm.device, first_on_host=first_on_host
        )
        self._account.tell(self._watch)
        if assignment.config.tensorboard:
            self._account.tell(TensorBoardWriter(assignment.folder, comm.rank, self._stopwatch.clock, comm.device))
        before = self.model.register_forward_pre_hook(self._forward_starts, prepend=True, with_kwargs=True)
        after = self.model.register_forward_hook(self._forward_ends)
        self._undo.callback(before.remove)
        self._undo.callback(after.remove)
        self._account.report("start", steps=assignment.steps, steps_per_epoch=None, dropped=0)
        self._window_end = self._windows.end(0)
        self._begin_step()

    def note(
        self,
        *,
        loss: Tensor | float | None = None,
        samples: int | None = None,
        correct: Tensor | int | None = None,
    ) -> None:
        self._notes.append(StepNote(loss, samples, correct))

    def mean(self, value: float, samples: int = 1) -> float:
        if self._in_backward:
            return super().mean(value, samples)
        self._stopwatch.lap(DATA)  # Waiting for a rank that is late is not getting data.
        mean = super().mean(value, samples)
        self._stopwatch.lap(AGREE)
        return mean

    def step(self, max_norm: float | None = None) -> None:
        self._stopwatch.lap(BACKWARD)
        super().step(max_norm)
        self._stopwatch.lap(OPTIMISER)
        self._keep_notes()
        self._ledger.end_step(EPOCH, self._stopwatch.end())
        step = self.steps_done + 1
        if step == self._window_end or step == self._steps:
            self._windows.close(step)
            self._window_end = self._windows.end(step)
            self._windows.open()
        self.count_step()
        self._begin_step()

    def conclude(self) -> None:
        peak = peak_bytes(self.comm.device) if self._peak_is_ours else None
        self._watch.sampler.sample()
        folder, windows = self._account.folder, self._windows.times
        self._account.finish(results.summarise(self._strategy_text, self, folder, windows, peak))
        self._account.close()  # A script may leave without closing anything.

    def _begin_step(self) -> None:
        self._samples = 0
        self._in_backward = False
        self._notes: list[StepNote] = []
        self._stopwatch.begin()

    def _forward_starts(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if _is_training():
            self._stopwatch.lap(BACKWARD if self._in_backward else DATA)
            self._in_backward = True
            self._samples += leading_dimension((args, kwargs)) or 0

    def _forward_ends(self, _: nn.Module, __: Any, output: Any) -> None:
        if _is_training():
            self._stopwatch.lap(FORWARD)
            root = next((tensor for tensor in tensors_in(output) if tensor.requires_grad), None)
            if root is not None:
                self._stopwatch.watch_backward(root)

    def _keep_notes(self) -> None:
        """What the script told goes before what its calls of the model showed."""
        told = sum(note.samples or 0 for note in self._notes)
        if not told and not self._samples:
            raise WorkloadError(
                "sync.step() was called, but no samples went through sync.model.",
                hint="call sync.model(x) instead of the model, or tell sync.note(samples=…)",
            )
        self._ledger.count(told or self._samples)
        for note in self._notes:
            self._ledger.note(note.loss, 1 if note.samples is None else note.samples, note.correct)


def _is_training() -> bool:
    # torch.compile would compile the clock; a script that does it tells its samples by note().
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def leading_dimension(inputs: Any) -> int | None:
    """The length of the first tensor in what a model was given, however nested; None where there is none."""
    return next((len(tensor) for tensor in tensors_in(inputs) if tensor.dim()), None)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors in what a model was given or gives, however nested."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from tensors_in(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)


def _topology(assignment: ScriptTask, model: nn.Module, strategy: Strategy, comm: Comm) -> dict[str, Any]:
    """As a run of ours has it; the batch is the script's secret."""
    placement = Placement(comm.device, comm.backend, torch.get_num_threads())
    return {
        "workload": assignment.script.name,
        **describe_strategy(assignment.config.strategy, strategy),
        "world_size": dist.get_world_size(),
        "workers": comm.world_size,
        "ranks_per_host": int(os.environ.get("LOCAL_WORLD_SIZE", comm.world_size)),
        "batch": None,
        "batch_per_rank": [],
        **describe_place(placement, interface=os.environ.get("GLOO_SOCKET_IFNAME", "")),
        **describe_model(model),
        "classes": None,
        "user_optimizer": True,
        "lr": None,
        "log_every": assignment.config.log_every,
    }
