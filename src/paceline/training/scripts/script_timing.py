"""Timing of a script's training loop: writes the record of an ordinary run, from the calls that the script makes."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from paceline.comm import Comm
from paceline.comm.messages.nested_tensors import tensors_in
from paceline.comm.world import ranks_sharing_cores
from paceline.config import BatchNormMode, ReplicaGuardMode
from paceline.errors import WorkloadError
from paceline.measure.cores import core_share
from paceline.measure.slow_rank import stopwatch_for
from paceline.measure.steps import AGREE, BACKWARD, DATA, FORWARD, OPTIMISER, Stopwatch
from paceline.records import Topology
from paceline.records.events import StartEvent
from paceline.strategies.base.strategy import MakeOptimizer, Strategy
from paceline.training.placement import Placement
from paceline.training.recording.recording import Recording
from paceline.training.scripts.script_task import ScriptTask, TaskSync
from paceline.training.topology import topology_of

EPOCH = 0
"""Epoch of all steps: the epochs of a script are not known."""


class TimingTask(ScriptTask):
    """Task that records a given number of steps."""

    @property
    def steps(self) -> int:
        assert self.config.steps is not None, "compare sets the number of steps for scripts"
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
    """Values that a script reports for a step or one of its micro-batches."""

    loss: Tensor | float | None
    samples: int | None
    correct: Tensor | int | None


class TimedSync(TaskSync):
    """`Sync` that times and records the script's steps.

    A step lasts from the end of the previous one to the end of `step()`. The time before its first forward pass is
    data. The time between forward passes of `sync.model`, the loss included, is backward. Forward passes without
    gradients are not part of training.
    """

    def __init__(
        self,
        task: TimingTask,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        strategy: Strategy,
        comm: Comm,
        bn: BatchNormMode,
    ) -> None:
        self._guard_mode = task.config.replica_guard if "replica_guard" in task.script.settings else None
        """Mode of the replica guard that the command line sets; None if the script does."""
        first_on_host = int(os.environ.get("LOCAL_RANK", comm.rank)) == 0
        self._recording = Recording(task.config, comm, task.folder, first_on_host=first_on_host)
        config = replace(task.config, bn=bn, allow_unused=strategy.allow_unused)
        topology = _topology(task, model, strategy, comm)
        self._recording.describe(task.script.settings_to_keep(config), topology, task.command)
        super().__init__(task.steps, model, make_optimizer, strategy, comm, bn)
        self._undo.callback(self._recording.close)
        self._recording.start(self)
        self._stopwatch, self._windows = self._recording.stopwatch, self._recording.windows
        self._step_recorder = self._recording.step_recorder
        before = self.model.register_forward_pre_hook(self._forward_starts, prepend=True, with_kwargs=True)
        after = self.model.register_forward_hook(self._forward_ends)
        self._undo.callback(before.remove)
        self._undo.callback(after.remove)
        self._recording.write_event(StartEvent(steps=task.steps, steps_per_epoch=None, dropped=0))
        self._window_end = self._windows.next_end(0)
        self._begin_step()

    def guard_replicas(self, mode: ReplicaGuardMode) -> None:
        super().guard_replicas(self._guard_mode or mode)

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
        self._stopwatch.lap(DATA)  # The wait for other ranks is not counted as data loading.
        mean = super().mean(value, samples)
        self._stopwatch.lap(AGREE)
        return mean

    def step(self, max_norm: float | None = None, scaler: GradScaler | None = None) -> None:
        self._stopwatch.lap(BACKWARD)
        before = self.skipped_steps
        super().step(max_norm, scaler)
        self._stopwatch.lap(OPTIMISER)
        self._record_notes()
        self._step_recorder.end_step(EPOCH, self._stopwatch.end(), skipped=self.skipped_steps > before)
        step = self.steps_done + 1
        if step == self._window_end or step == self._steps:
            self._windows.close(step)
            self._window_end = self._windows.next_end(step)
            self._windows.open()
        self.count_step()
        self._begin_step()

    def write_result(self) -> None:
        self._recording.finish(self._recording.summarise())
        self._recording.close()  # A script may end without closing anything.

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

    def _record_notes(self) -> None:
        """Record samples, loss and correct predictions; reported samples have priority over those counted in calls."""
        noted_samples = sum(note.samples or 0 for note in self._notes)
        if not noted_samples and not self._samples:
            raise WorkloadError(
                "sync.step() was called, but sync.model has processed no samples.",
                hint="call sync.model(x) instead of the model, or report the samples with sync.note(samples=…)",
            )
        self._step_recorder.add_samples(noted_samples or self._samples)
        for note in self._notes:
            self._step_recorder.add_figures(note.loss, 1 if note.samples is None else note.samples, note.correct)


def _is_training() -> bool:
    # torch.compile would trace the stopwatch; a compiled script reports its samples by note().
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def leading_dimension(inputs: Any) -> int | None:
    """Return the length of the first tensor in nested inputs of a model; None without one."""
    return next((len(tensor) for tensor in tensors_in(inputs) if tensor.dim()), None)


def _topology(task: ScriptTask, model: nn.Module, strategy: Strategy, comm: Comm) -> Topology:
    return topology_of(
        task.config,
        strategy,
        model,
        comm,
        Placement(comm.device, comm.backend, torch.get_num_threads()),
        workload=task.script.name,
        interface=os.environ.get("GLOO_SOCKET_IFNAME", ""),
        world_size=dist.get_world_size(),
        ranks_per_host=int(os.environ.get("LOCAL_WORLD_SIZE", comm.world_size)),
        ranks_sharing_cores=ranks_sharing_cores(comm.world_size),
    )
