"""Checkpoints of a run: when they are due, what they contain besides tensors, and what they cost."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from paceline.comm.messages.json_messages import gather_typed
from paceline.config import RunConfig
from paceline.errors import CheckpointError, UsageError
from paceline.records.checkpoint import CheckpointInfo
from paceline.records.events import CheckpointEvent
from paceline.records.provenance import version_of
from paceline.records.schema import CHECKPOINTS_FOLDER
from paceline.records.summary import BestEvaluation
from paceline.records.value_types import Count
from paceline.training.checkpoints.capture import Captured, capture
from paceline.training.checkpoints.storage.async_writer import AsyncWriter, unexpected_error
from paceline.training.checkpoints.storage.contents import EncodedCheckpoint
from paceline.training.checkpoints.storage.folder import CheckpointFolder
from paceline.training.recording.evaluations import Evaluations
from paceline.training.recording.history import TrainedTotals
from paceline.training.recording.recording import Recording
from paceline.training.sync import Sync
from paceline.workloads.batches import Source
from paceline.workloads.position import Position


class LoopState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the training loop, besides its position, that a checkpoint keeps."""

    optimizer: str
    """Class of the optimiser: the state of one is of no use to another."""
    world_size: Count
    """Ranks of the launch, with servers and idle ones."""
    epoch_ends: list[Count]
    """Step at which each finished epoch ended."""
    totals: TrainedTotals
    skipped_steps: Count = 0
    best: BestEvaluation | None = None
    evaluated_step: Count | None = None
    evaluated_epochs: Count = 0
    scheduler: Any = None
    """State of the workload's own learning-rate scheduler."""
    scaler: Any = None
    """State of the GradScaler."""

    @classmethod
    def of(cls, values: dict[str, Any]) -> LoopState:
        """Return the state from the values of a checkpoint; those of the scheduler and the scaler may hold tensors."""
        own = {key: value for key, value in values.items() if key not in ("scheduler", "scaler")}
        kept = msgspec.convert(own, cls)
        return msgspec.structs.replace(kept, scheduler=values.get("scheduler"), scaler=values.get("scaler"))


@dataclass(frozen=True)
class Written:
    """A checkpoint that was written, or could not be."""

    step: int
    seconds: float
    bytes: int
    error: CheckpointError | None = None


class TimedFolder(CheckpointFolder):
    """Folder of checkpoints that keeps how long each one took, in whichever thread it was written."""

    def __init__(self, path: Path, keep: int) -> None:
        super().__init__(path, keep)
        self._written: deque[Written] = deque()  # Its methods are atomic.

    def write_encoded(self, encoded: EncodedCheckpoint, *, is_best: bool = False) -> Path:
        began_s, step = time.perf_counter(), encoded.info.step
        try:
            path = super().write_encoded(encoded, is_best=is_best)
        except Exception as error:
            known = error if isinstance(error, CheckpointError) else unexpected_error(error, step)
            self._written.append(Written(step, time.perf_counter() - began_s, 0, known))
            raise known from error
        size = sum(file.stat().st_size for file in path.iterdir())
        self._written.append(Written(step, time.perf_counter() - began_s, size))
        return path

    def take_written(self) -> list[Written]:
        """Return the checkpoints that were finished since the last call."""
        return [self._written.popleft() for _ in range(len(self._written))]


class Checkpointer:
    """Writes the checkpoints of one run; every rank makes the same calls, and rank 0 writes."""

    def __init__(
        self,
        config: RunConfig,
        given: RunConfig,
        sync: Sync,
        recording: Recording,
        evaluations: Evaluations | None,
        folder: Path,
        keep_loop: Callable[[], dict[str, Any]],
    ) -> None:
        """Prepare to write checkpoints.

        `given` is the config that they keep; `keep_loop` returns the state of the scheduler and of the scaler.
        """
        interval = config.checkpoint_interval
        assert interval is not None, "a run without checkpoints needs no checkpointer"
        self._interval = interval
        self._config, self._sync, self._recording, self._evaluations = config, sync, recording, evaluations
        self._given, self._keep_loop = given, keep_loop
        self._is_async = config.checkpoint_mode == "async"
        self._folder = TimedFolder(folder / CHECKPOINTS_FOLDER, config.keep)
        self._writer = AsyncWriter(self._folder) if self._is_async and sync.rank == 0 else None
        self._last = Position()
        self._last_s = recording.windows.totals.wall_s
        self._pending: dict[int, CheckpointEvent] = {}
        """Checkpoints that are being written, by step."""
        self._failure: tuple[int, CheckpointError] | None = None
        """Step and error of the last checkpoint, if it could not be written; known on rank 0 only."""
        self._is_checked = False
        """Whether the state of this run is known to fit into a checkpoint."""

    def start(self, position: Position) -> None:
        """Begin to count at the position where the run starts or resumes."""
        self._last = position
        if self._sync.rank == 0:
            self._forget_later_best(position)

    def _forget_later_best(self, position: Position) -> None:
        """Mark the best checkpoint of the steps before a position: a later one is of steps that are trained again."""
        marked = self._folder.best()
        if self._evaluations is not None:
            best = None if self._evaluations.best is None else self._evaluations.best.step
        else:
            best = marked if marked is not None and marked <= position.step else None
        if marked != best:
            with suppress(CheckpointError):
                self._folder.reset_best(best)

    def write_if_due(self, position: Position) -> None:
        """Write a checkpoint between two windows, if it is time to, or if the weights have the best test result."""
        self._report_written()
        if position.step == self._last.step:
            return
        if self._is_due(position) or self._is_new_best(position):
            self.write(position)
        elif not self._is_checked:
            self._check_keepable(position)

    def write(self, position: Position, *, must_succeed: bool = False) -> None:
        """Write a checkpoint, unless that of this step is written.

        If one could not be written, raise on all ranks if it `must_succeed` or the user wants it, else go on.
        """
        if position.step == self._last.step:
            return
        self._is_checked = True
        began_s, is_best = self._recording.stopwatch.clock.now(), self._is_new_best(position)
        captured = capture(self._sync, keeps_own_buffers=self._keeps_own_buffers)
        self._sync.comm.control.while_others_wait(lambda: self._write(captured, position, began_s, is_best))
        self._last, self._last_s = position, self._recording.windows.totals.wall_s
        self._raise_failure(position.step if must_succeed else None)
        self._leave_payload_out()

    def finish(self, *, must_succeed: bool = False) -> None:
        """Wait until all checkpoints are on disk; called on every rank at the end of the run."""
        self.wait()
        self._report_written()
        self._raise_failure(self._last.step if must_succeed else None)

    def wait(self) -> None:
        """Wait until nothing is being written, however long it takes; called on every rank."""
        self._sync.comm.control.while_others_wait(self.close)

    def close(self) -> None:
        """End the thread that writes; called after an error, too."""
        if self._writer is not None:
            self._writer.close()

    def mark_best(self, step: int) -> None:
        """Mark the checkpoint of a step as the best, if it was written; called on rank 0."""
        with suppress(CheckpointError):
            self._folder.mark_best(step)

    def _check_keepable(self, position: Position) -> None:
        """Raise on all ranks if a checkpoint cannot keep the state, after the first window.

        Optimisers make their state in a step, so it is not known earlier.
        """
        self._is_checked = True
        captured = capture(self._sync, keeps_own_buffers=self._keeps_own_buffers)
        if self._sync.rank == 0:
            try:
                EncodedCheckpoint.of(captured.state, captured.param_groups, self._info(position, captured.random))
            except CheckpointError as error:
                self._failure = position.step, error
        self._raise_failure(position.step)
        self._leave_payload_out()

    def _is_due(self, position: Position) -> bool:
        interval, last = self._interval, self._last
        if interval.steps is not None:
            return position.step // interval.steps > last.step // interval.steps
        if interval.seconds is not None:
            now_s = self._recording.windows.totals.wall_s
            return now_s // interval.seconds > self._last_s // interval.seconds
        return position.epoch > last.epoch

    def _is_new_best(self, position: Position) -> bool:
        best = None if self._evaluations is None else self._evaluations.best
        return best is not None and best.step == position.step

    @property
    def _keeps_own_buffers(self) -> bool:
        """Whether ranks have different running statistics that training goes on with."""
        is_shared = self._config.bn == "sync" or (self._config.bn == "broadcast" and self._sync.strategy.lockstep)
        return self._sync.ranks > 1 and not is_shared

    def _info(self, position: Position, random: list[Any]) -> CheckpointInfo:
        sync, windows, evaluations = self._sync, self._recording.windows, self._evaluations
        loop = LoopState(
            optimizer=type(sync.optimizer).__qualname__,
            world_size=dist.get_world_size(),
            epoch_ends=list(position.epoch_ends),
            totals=windows.trained,
            skipped_steps=sync.skipped_steps,
            best=None if evaluations is None else evaluations.best,
            evaluated_step=None if evaluations is None else evaluations.last_step,
            evaluated_epochs=0 if evaluations is None else evaluations.epochs,
        )
        return CheckpointInfo(
            step=position.step,
            epoch=position.epoch,
            epoch_samples=position.epoch_samples,
            epoch_batches=position.epoch_batches,
            samples=windows.trained.samples,
            strategy=self._config.strategy,
            ranks=sync.ranks,
            config=dataclasses.asdict(self._given),
            loop=msgspec.to_builtins(loop) | self._keep_loop(),
            random=random,
            time=time.time(),
            versions={name: version_of(name) or "" for name in ("paceline", "torch")},
        )

    def _write(self, captured: Captured, position: Position, began_s: float, is_best: bool) -> None:
        """Write a checkpoint on rank 0, or begin to."""
        now, info = self._recording.stopwatch.clock.now, self._info(position, captured.random)
        event = CheckpointEvent(
            step=info.step, started_s=began_s, stall_s=0.0, write_s=None, is_async=self._is_async, is_best=is_best
        )
        error: CheckpointError | None = None
        try:
            (self._writer or self._folder).write(captured.state, captured.param_groups, info, is_best=is_best)
        except CheckpointError as found:
            error = found
        except MemoryError as found:  # There is no memory for the copy.
            error = unexpected_error(found, info.step)
        self._pending[info.step] = msgspec.structs.replace(event, stall_s=now() - began_s)
        self._report_written()
        if error is not None and info.step in self._pending:  # It failed before anything was written.
            self._report(Written(info.step, 0.0, 0, error))

    def _report_written(self) -> None:
        """Write an event for each checkpoint that has been written meanwhile."""
        for written in self._folder.take_written():
            self._report(written)

    def _report(self, written: Written) -> None:
        event, error = self._pending.pop(written.step), written.error
        self._failure = None if error is None else (written.step, error)
        # What it takes to copy the state in the background is part of the stall.
        write_s = written.seconds if event.is_async else event.stall_s
        self._recording.write_event(
            msgspec.structs.replace(
                event,
                write_s=None if error is not None else write_s,
                bytes=written.bytes,
                error=None if error is None else error.message,
            )
        )

    def _leave_payload_out(self) -> None:
        """Count no bytes that a checkpoint sends: they do not belong to the next window."""
        if self._sync.payload is not None:
            self._sync.payload.close_window(0, counts=False)

    def _raise_failure(self, needed_step: int | None) -> None:
        """Raise on all ranks if rank 0 could not write a checkpoint.

        If the run goes on without checkpoints, only the one of `needed_step` must have been written.
        """
        goes_on = self._config.on_checkpoint_error == "continue"
        if goes_on and needed_step is None:
            return
        found = ["", ""]
        if self._failure is not None and (not goes_on or self._failure[0] == needed_step):
            error = self._failure[1]
            found = [error.message, error.hint or ""]
        message, hint = gather_typed(found, list[str], self._sync.comm.control)[0]
        if message:
            raise CheckpointError(message, hint=hint)


def check_position_is_known(sync: Sync, source: Source) -> None:
    """Raise if the position in the data is unknown: with an iterable, if ranks do not step together."""
    if not sync.strategy.lockstep and source.batch is None:
        raise UsageError(
            "checkpoints need to know how many samples were trained, but the data is an iterable of batches, and under "
            f"{sync.strategy.name} ranks do not step together.",
            hint="use a data set with a length, or a strategy under which ranks step together",
        )
