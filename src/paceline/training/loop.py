"""The training loop on one rank, from the first batch to the last step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from paceline.config import ENDLESS, RunConfig
from paceline.errors import WorkloadError
from paceline.measure.steps import AGREE, BACKWARD, DATA, FORWARD, OPTIMISER
from paceline.records.events import EpochEvent, StartEvent
from paceline.training.divergence import DivergenceCheck
from paceline.training.learning_rate import make_learning_rate
from paceline.training.precision import autocast, make_scaler
from paceline.training.recording.evaluations import Evaluations
from paceline.training.recording.recording import Recording
from paceline.training.sync import Sync
from paceline.workloads.batches import MicroBatch, Source
from paceline.workloads.tickets import ONE_SHOT_HINT, Tickets
from paceline.workloads.workload import Workload


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

    def __post_init__(self) -> None:
        self.stopwatch, self.windows = self.recording.stopwatch, self.recording.windows
        self.divergence = DivergenceCheck(self.config, self.workload, self.sync, self.source, self.windows)
        self.scaler = make_scaler(self.config.precision, self.source.share.device, self.config.on_nan)
        self._restores_buffers = self.scaler is not None  # It may skip steps, whose statistics are not finite either.
        self.learning_rate = make_learning_rate(
            self.workload,
            self.sync.optimizer,
            self.source.expected_steps,
            self._expected_length,
            total=None if self.config.seconds is not None else self._total,
            has_end=self.config.seconds is not None or self._total is not None,
        )
        self._step = 0
        """Steps that this rank has trained."""

    def train(self) -> None:
        """Train for the configured epochs, steps or seconds."""
        total = self._total
        source = self.source
        start = StartEvent(steps=total, steps_per_epoch=source.expected_steps, dropped=source.dropped)
        self.recording.write_event(start)
        if self.sync.strategy.lockstep:
            self._train_in_lockstep(total)
        else:
            self._train_by_tickets(total)

    def _train_in_lockstep(self, total: int | None) -> None:
        """Train this rank's share of every step; all ranks step together."""
        step = 0
        for epoch in itertools.count():
            self._check_drawn_order(epoch)
            before, end, ended = step, self._epoch_end(step, total), False
            steps = self.source.epoch(epoch)
            while not ended and step != end and not self.windows.time_is_up:
                self._evaluate_if_due(step, epoch)
                window = self.windows.next_end(step) - step
                count = window if end is None else min(window, end - step)
                self.windows.open()
                trained = self._train_steps(epoch, steps, count)
                ended = trained < count
                if trained:
                    step += trained
                    self.windows.close(step)
                    self.divergence.after_window()
            self._report_epoch(epoch, step)
            if step == before:
                raise WorkloadError(f"the training data has no batch in epoch {epoch + 1}.", hint=ONE_SHOT_HINT)
            if step == total or self.windows.time_is_up or (total is None and epoch + 1 == self.config.most_epochs):
                return
        raise AssertionError("the loop ends by its steps or its epochs")

    def _train_by_tickets(self, total: int | None) -> None:
        """Train the shares that this rank's tickets name; ranks wait for each other only at the end of a window."""
        tickets, workers = Tickets(self.source, self.config.most_epochs, total), self.sync.ranks
        step, epoch = 0, 0
        while not self.windows.time_is_up and not self._ended_on_all_ranks(tickets):
            self._evaluate_if_due(step, epoch)
            end = self.windows.next_end(step)
            if total is not None and total - end < (end - step) / 2:  # In a short last window ranks would mostly wait.
                end = total
            self.windows.open()
            while (ticket := self.sync.ticket) < end * workers:
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
        self._report_epoch(epoch, step)

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
        stopwatch, source, model = self.stopwatch, self.source, self.sync.model
        step = self._step if global_step is None else global_step
        self.learning_rate.before_step(step)
        self.windows.note_learning_rate(step)
        self._step += 1
        step_recorder = self.recording.step_recorder
        if self._restores_buffers:
            self.sync.buffers.keep()
        for number, micro_batch in enumerate(micro_batches, start=1):
            batch = source.fetch(micro_batch)
            stopwatch.lap(DATA)
            with self.sync.microbatch(last=number == len(micro_batches)):
                with autocast(self.config.precision, source.share.device):
                    outcome = self.workload.forward(model, batch)
                step_recorder.add_micro_batch(micro_batch.samples, outcome.loss, self.workload.count_correct(outcome))
                stopwatch.lap(FORWARD)
                loss = outcome.loss if micro_batch.weight == 1 else outcome.loss * micro_batch.weight
                if self.scaler is not None:
                    loss = self.scaler.scale(loss)
                stopwatch.watch_backward(loss)
                loss.backward()
                stopwatch.lap(BACKWARD)
        skipped_before = self.sync.skipped_steps
        self.sync.step(self.config.clip_norm, self.scaler)
        is_skipped = self.sync.skipped_steps > skipped_before
        if is_skipped and self._restores_buffers:
            self.sync.buffers.restore()
        stopwatch.lap(OPTIMISER)
        step_recorder.end_step(epoch, stopwatch.end(), global_step, skipped=is_skipped)

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
        per_epoch = self.source.steps_per_epoch()
        return None if per_epoch is None else self.sync.comm.control.smallest(per_epoch) * self.config.most_epochs

    def _epoch_end(self, step: int, total: int | None) -> int | None:
        """Return the step at which the epoch or the run ends, the same on all ranks; None if the length is unknown."""
        per_epoch = self.source.steps_per_epoch()
        if per_epoch is None:
            return total
        end = step + self.sync.comm.control.smallest(per_epoch)
        return end if total is None else min(end, total)

    def _ended(self, micro_batches: list[MicroBatch] | None) -> bool:
        """Whether the data has ended on any rank. If its length is unknown, this costs one small message per step."""
        if self.source.steps_per_epoch() is not None:
            return micro_batches is None
        self.stopwatch.lap(DATA)  # The wait for a rank with slow data is not counted as loading this rank's data.
        ended = self.sync.comm.control.smallest(int(micro_batches is not None)) == 0
        self.stopwatch.lap(AGREE)
        return ended
