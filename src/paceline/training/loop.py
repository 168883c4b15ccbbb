"""The training loop on one rank, from the first batch to the last step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from paceline.comm.stores.stop_request import NO_STOP, StopRequest
from paceline.config import ENDLESS, RunConfig
from paceline.errors import CheckpointError, DivergenceError, PreemptedError, WorkloadError
from paceline.measure.activity import ACTIVITY
from paceline.measure.start_up import START_UP
from paceline.measure.steps import AGREE, DATA
from paceline.records.events import CompilingEvent, EpochEvent, StartEvent
from paceline.training.checkpoints.checkpointer import Checkpointer, check_position_is_known
from paceline.training.checkpoints.resume import ResumePoint, load_into
from paceline.training.divergence import DivergenceCheck
from paceline.training.graphs.make_step import make_step
from paceline.training.learning_rate import LearningRate, make_learning_rate
from paceline.training.precision import make_scaler
from paceline.training.recording.evaluations import Evaluations
from paceline.training.recording.recording import Recording
from paceline.training.stops import Stops
from paceline.training.sync import Sync
from paceline.workloads.batches import MicroBatch, Source
from paceline.workloads.position import START, Position
from paceline.workloads.tickets import ONE_SHOT_HINT, Tickets
from paceline.workloads.workload import Workload

RAISED_ON_ALL_RANKS = (DivergenceError, CheckpointError, PreemptedError)
"""Errors of training that are raised on all ranks alike, so that these can still communicate."""


@dataclass
class TrainingLoop:
    """Training of a workload through a `Sync`."""

    config: RunConfig
    workload: Workload
    sync: Sync
    source: Source
    recording: Recording
    evaluations: Evaluations | None = None
    """Evaluations while it trains; None if nothing is tested."""
    checkpoints: Path | None = None
    """Folder of the run, where its checkpoints are written."""
    given: RunConfig | None = None
    """Config that checkpoints keep: without the values of the recipe, so that a run that resumes may change them."""
    stop: StopRequest = NO_STOP
    """Request of the launcher to stop after a checkpoint."""
    launched_at_s: float | None = None
    """Unix time at which the ranks were launched, or at which the run before this one ended; None if unknown."""

    def __post_init__(self) -> None:
        self._start = START
        self.stopwatch, self.windows = self.recording.stopwatch, self.recording.windows
        self.divergence = DivergenceCheck(self.config, self.workload, self.sync, self.source, self.windows)
        self.scaler = make_scaler(self.config.precision, self.source.share.device, self.config.on_nan)
        self.training_step = make_step(self.config, self.workload, self.sync, self.source, self.recording, self.scaler)
        self._step = 0
        """Steps that this rank has trained, and those before the run resumed."""
        self._epoch_began = 0
        """Samples trained before the present epoch."""
        self.checkpointer: Checkpointer | None = None
        if self.checkpoints is not None and self.config.checkpoint_interval is not None:
            check_position_is_known(self.sync, self.source)
            self.checkpointer = Checkpointer(
                self.config,
                self.given or self.config,
                self.sync,
                self.recording,
                self.evaluations,
                self.checkpoints,
                self._kept,
            )
        self.stops = Stops(self.stop, self.sync, self.windows, self.checkpointer)

    @cached_property
    def learning_rate(self) -> LearningRate:
        """Setter of the learning rate. It is made when the position at which the run starts is known."""
        return make_learning_rate(
            self.workload,
            self.sync.optimizer,
            self.source.expected_steps,
            self._expected_length,
            total=None if self.config.seconds is not None else self._total,
            has_end=self.config.seconds is not None or self._total is not None,
        )

    def resume(self, point: ResumePoint) -> list[str]:
        """Continue from a checkpoint; return what of it could not be used, in words. Called on every rank."""
        self._start = self.source.normalised(point.position)
        self._step = self._start.step
        learning_rate, kept = self.learning_rate, None if point.loop is None else point.loop.scheduler
        # The settings of an optimiser from a recipe are those of the command line, which may have changed.
        has_own = self.workload.scheduler is not None or self.workload.optimizer is not None
        lost = load_into(self.sync, point, keeps_groups=has_own and learning_rate.can_load(kept))
        if point.loop is not None:
            lost += learning_rate.load(kept)
            if self.scaler is not None and point.loop.scaler is not None:
                self.scaler.load_state_dict(point.loop.scaler)
            if self.evaluations is not None:
                is_same_data = point.info is not None and point.info.config.get("data") == self.config.data
                self.evaluations.resume(
                    point.loop.best if is_same_data else None,
                    last_step=point.loop.evaluated_step,
                    epochs=point.loop.evaluated_epochs,
                )
        return lost

    def _kept(self) -> dict[str, Any]:
        """Return the states of the scheduler and of the scaler, which a checkpoint keeps."""
        scaler = None if self.scaler is None else self.scaler.state_dict()
        return {"scheduler": self.learning_rate.state(), "scaler": scaler}

    def train(self) -> None:
        """Train for the configured epochs, steps or seconds, or until the target is reached."""
        total = self._total
        source = self.source
        if self.config.compile:
            self.recording.write_event(CompilingEvent())
        compile_s = self.training_step.prepare()
        START_UP.end_of("compiling the model" if self.config.compile else "preparing the first step")
        start = StartEvent(
            steps=total,
            steps_per_epoch=source.expected_steps,
            dropped=source.dropped,
            start_up_s=None if self.launched_at_s is None else max(0.0, time.time() - self.launched_at_s),
            compile_s=compile_s,
            start_up_parts_s=None if self.launched_at_s is None else START_UP.parts(),
        )
        self.recording.write_event(start)
        _ = self.learning_rate  # Raises before the first step if the schedule needs a length that is unknown.
        if self.checkpointer is not None:
            self.checkpointer.start(self._start)
        try:
            end = self._train_in_lockstep(total) if self.sync.strategy.lockstep else self._train_by_tickets(total)
            if self.checkpointer is not None:
                self._evaluate_if_due(end.step, end.epoch)
                self.checkpointer.write(end)
                self.checkpointer.finish()
        except RAISED_ON_ALL_RANKS:
            if self.checkpointer is not None:
                self.checkpointer.wait()
            raise
        finally:
            self.training_step.close()
            if self.checkpointer is not None:
                self.checkpointer.close()

    def _train_in_lockstep(self, total: int | None) -> Position:
        """Train this rank's share of every step; all ranks step together. Return the position at the end."""
        step, skip = self._start.step, self._start.epoch_samples
        if self._is_over(step, self._start.epoch, total):
            return self._start
        for epoch in itertools.count(self._start.epoch):
            self._check_drawn_order(epoch)
            before, end, ended = step, self._epoch_end(step, total, skip), False
            steps = self.source.epoch(epoch, self._start if skip else START)
            self._epoch_began, resumes, skip = self.windows.trained.samples - skip, skip > 0, 0
            while not ended and step != end and not self.windows.time_is_up:
                self._between_windows(step, epoch)
                if self._is_target_reached:
                    if step > before:
                        self._report_epoch(epoch, step)
                    return self._position(step, epoch)
                window = self.windows.next_end(step) - step
                count = window if end is None else min(window, end - step)
                count = self.stops.limit_window(step, count)
                self.windows.open()
                trained = self._train_steps(epoch, steps, count)
                ended = trained < count
                if trained:
                    step += trained
                    self.windows.close(step)
                    self.divergence.after_window()
                if self.stops.is_reached(step):
                    self.stops.stop(self._position(step, epoch))
            self._report_epoch(epoch, step)
            if step == before and not resumes:
                raise WorkloadError(f"the training data has no batch in epoch {epoch + 1}.", hint=ONE_SHOT_HINT)
            if self._is_over(step, epoch + 1, total):
                return (
                    self._position(step, epoch)
                    if not ended
                    else Position(step=step, epoch=epoch + 1, epoch_ends=(*self.windows.epoch_ends[:epoch], step))
                )
        raise AssertionError("the loop ends by its steps or its epochs")

    def _is_over(self, step: int, epochs: int, total: int | None) -> bool:
        """Whether the run ends after so many steps and whole epochs."""
        if self._is_target_reached:
            return True
        if total is not None:
            return step >= total or self.windows.time_is_up
        return self.windows.time_is_up or epochs >= self.config.most_epochs

    def _train_by_tickets(self, total: int | None) -> Position:
        """Train the shares that this rank's tickets name; ranks wait for each other only at the end of a window."""
        tickets, workers = Tickets(self.source, self.config.most_epochs, total, self._start), self.sync.ranks
        first, epoch = self._start.step, self._start.epoch
        step = first
        while not self.windows.time_is_up and not self._ended_on_all_ranks(tickets):
            self._between_windows(step, epoch)
            if self._is_target_reached:
                break
            end = self.windows.next_end(step, total)
            end = step + self.stops.limit_window(step, end - step)
            self.windows.open()
            while (ticket := self.sync.ticket) < (end - first) * workers:
                self.stopwatch.begin()
                found = tickets.find(ticket)
                if found is None:
                    self.stopwatch.drop()
                    break
                self._train_micro_batches(found.epoch, found.micro_batches, global_step=found.step)
            step = self.windows.close(end)
            self.divergence.after_window()
            for epoch_end in self.windows.epoch_ends[epoch:]:
                self._report_epoch(epoch, epoch_end)
                epoch += 1
            if self.stops.is_reached(step):
                self.stops.stop(self._position(step, epoch))
        self._report_epoch(epoch, step)
        return self._position(step, epoch)

    def _between_windows(self, step: int, epoch: int) -> None:
        """Evaluate and write a checkpoint, if it is time to, after `step` steps and `epoch` whole epochs."""
        self._evaluate_if_due(step, epoch)
        if self.checkpointer is not None and not self.windows.is_profiling:
            with ACTIVITY.doing("at a checkpoint"):
                self.checkpointer.write_if_due(self._position(step, epoch))
        self.training_step.between_windows()

    def _position(self, step: int, epoch: int) -> Position:
        """Return the position in the data after a window; `epoch` is that of the last step, or of the next one."""
        if self.sync.strategy.lockstep:
            in_epoch = self.windows.trained.samples - self._epoch_began
        else:  # Windows do not end with epochs, but all shares of all steps are trained.
            start, batch = self._start, self.source.batch
            assert batch is not None, "a checkpointer refuses data whose position is unknown"
            since = start if epoch == start.epoch else Position(step=self.windows.epoch_ends[epoch - 1])
            in_epoch = since.epoch_samples + (step - since.step) * batch
        ends = tuple(self.windows.epoch_ends[:epoch])
        if self.sync.strategy.lockstep and len(ends) < epoch:  # Windows know an end by the step that follows it.
            ends = (*ends, *[step] * (epoch - len(ends)))
        return self.source.normalised(
            Position(
                step=step,
                epoch=epoch,
                epoch_samples=in_epoch,
                epoch_batches=self.source.read_batches if in_epoch else 0,
                epoch_ends=ends,
            )
        )

    def _check_drawn_order(self, epoch: int) -> None:
        """Raise if the user's sampler has drawn other samples on some rank."""
        checksum = self.source.order_checksum(epoch)
        if checksum is None:
            return
        by_rank = [int(found) for found in self.sync.comm.control.gather(torch.tensor(checksum))]
        other = next((rank for rank, found in enumerate(by_rank) if found != by_rank[0]), None)
        if other is not None:
            raise WorkloadError(
                f"the DataLoader's sampler drew other samples on rank {other} than on rank 0 in epoch {epoch + 1}.",
                hint="let it draw from torch's, numpy's or Python's global generator, or from one with a fixed seed",
            )

    def _report_epoch(self, epoch: int, step: int) -> None:
        divergence = self.sync.buffers.divergence()
        self.recording.write_event(EpochEvent(epoch=epoch, step=step, buffer_divergence=divergence))

    def _evaluate_if_due(self, step: int, epochs: int) -> None:
        """Evaluate before the next window, if it is time to, after `step` steps and `epochs` whole epochs."""
        if self.evaluations is not None:
            self.evaluations.run_if_due(step, epochs)

    @property
    def _is_target_reached(self) -> bool:
        """Whether an evaluation has reached the target of the run, which ends it; the same on all ranks."""
        return self.evaluations is not None and self.evaluations.is_target_reached

    def _ended_on_all_ranks(self, tickets: Tickets) -> bool:
        """Whether every rank has trained all its data."""
        return self.sync.comm.control.smallest(int(tickets.find(self.sync.ticket) is None)) == 1

    def _train_steps(self, epoch: int, steps: Iterator[list[MicroBatch]], count: int) -> int:
        """Train `count` steps, or fewer if the data ends; return the number of steps trained."""
        for trained in range(count):
            if not self.train_step(epoch, steps):
                return trained
        return count

    def train_step(self, epoch: int, steps: Iterator[list[MicroBatch]]) -> bool:
        """Train one step: forward and backward of this rank's micro-batches, then synchronisation and optimiser.

        Return False, without training, if the data has ended on any rank.
        """
        self.stopwatch.begin()
        micro_batches = next(steps, None)
        if self._ended(micro_batches):
            self.stopwatch.drop()
            return False
        assert micro_batches is not None
        self._train_micro_batches(epoch, micro_batches)
        return True

    def _train_micro_batches(self, epoch: int, micro_batches: list[MicroBatch], global_step: int | None = None) -> None:
        """Train a step that the stopwatch has begun; `global_step` is its number if ranks do not step together."""
        step = self._step if global_step is None else global_step
        self.learning_rate.before_step(step)
        self.windows.note_learning_rate(step)
        self._step += 1
        noise = self.sync.noise
        noise.begin_step(step)
        is_skipped = self.training_step.run(micro_batches)
        laps = self.stopwatch.end()
        self.recording.step_recorder.end_step(epoch, laps, global_step, skipped=is_skipped, noise=noise.end_step())

    def _expected_length(self, step: int) -> int | None:
        """Return the steps of the whole run; for a run that ends by time, estimated from the last window."""
        if self.config.seconds is None:
            return self._total
        estimated = self.windows.expected_end(step)
        return estimated if self._total is None else min(estimated, self._total)

    @cached_property
    def _total(self) -> int | None:
        return self.total_steps()

    def total_steps(self) -> int | None:
        """Return the steps of the whole run; None if the length of the data is unknown."""
        if self.config.steps is not None:
            return self.config.steps
        if self.config.most_epochs == ENDLESS:
            return None
        per_epoch, left = self.source.steps_per_epoch(), self.source.steps_after(self._start.epoch_samples)
        if per_epoch is None or left is None:
            return None
        start, smallest = self._start, self.sync.comm.control.smallest
        epochs = self.config.most_epochs - start.epoch
        return start.step if epochs <= 0 else start.step + smallest(left) + smallest(per_epoch) * (epochs - 1)

    def _epoch_end(self, step: int, total: int | None, skip: int) -> int | None:
        """Return the step at which the epoch or the run ends, the same on all ranks; None if the length is unknown.

        The epoch begins after its first `skip` samples.
        """
        left = self.source.steps_after(skip)
        if left is None:
            return total
        end = step + self.sync.comm.control.smallest(left)
        return end if total is None else min(end, total)

    def _ended(self, micro_batches: list[MicroBatch] | None) -> bool:
        """Whether the data has ended on any rank. If its length is unknown, this costs one small message per step."""
        if self.source.steps_per_epoch() is not None:
            return micro_batches is None
        self.stopwatch.lap(DATA)  # The wait for a rank with slow data is not counted as loading this rank's data.
        ended = self.sync.comm.control.smallest(int(micro_batches is not None)) == 0
        self.stopwatch.lap(AGREE)
        return ended
