"""The training loop: from the first batch to the summary, on one rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.config import RunConfig
from paceline.errors import WorkloadError
from paceline.measure.steps import AGREE, BACKWARD, DATA, FORWARD, OPTIMISER, Stopwatch
from paceline.training.account import Report
from paceline.training.ledger import Ledger
from paceline.training.precision import autocast
from paceline.training.sync import Sync
from paceline.training.windows import Windows
from paceline.workloads.batches import Piece, Source
from paceline.workloads.workload import Workload

_ONE_SHOT = "give a data set or something that can be iterated again, not a generator that runs once"


@dataclass
class Loop:
    """Trains a workload through a `Sync`."""

    config: RunConfig
    workload: Workload
    sync: Sync
    source: Source
    stopwatch: Stopwatch
    ledger: Ledger
    windows: Windows
    report: Report

    def train(self) -> None:
        """Trains for the epochs or steps asked for."""
        step = 0
        total = self.total_steps()
        self.report("start", steps=total, steps_per_epoch=self.source.expected_steps, dropped=self.source.dropped)
        for epoch in itertools.count():
            before, end, ended = step, self._epoch_end(step, total), False
            steps = self.source.epoch(epoch)
            while not ended and step != end:
                window = self.windows.end(step) - step
                count = window if end is None else min(window, end - step)
                self.windows.open()
                trained = self._train_steps(epoch, steps, count)
                ended = trained < count
                if trained:
                    step += trained
                    self.windows.close(epoch, step)
            self.report("epoch", epoch=epoch, step=step, buffer_divergence=self.sync.buffers.divergence())
            if step == before:
                raise WorkloadError(f"the training data gave no batch in epoch {epoch + 1}.", hint=_ONE_SHOT)
            if step == total or (total is None and epoch + 1 == (self.config.epochs or 1)):
                return
        raise AssertionError("the loop ends by its steps or its epochs")

    def _train_steps(self, epoch: int, steps: Iterator[list[Piece]], count: int) -> int:
        """Trains `count` steps, or as many as the data has; returns how many."""
        for trained in range(count):
            if not self.train_step(epoch, steps):
                return trained
        return count

    def train_step(self, epoch: int, steps: Iterator[list[Piece]]) -> bool:
        """One step: this rank's micro-batches forward and backward, then agreement and the optimiser.

        Returns False, having done nothing, when the data has ended on any rank.
        """
        stopwatch, source, model = self.stopwatch, self.source, self.sync.model
        stopwatch.begin()
        pieces = next(steps, None)
        if self._ended(pieces):
            stopwatch.drop()
            return False
        assert pieces is not None
        for number, piece in enumerate(pieces, start=1):
            batch = source.fetch(piece)
            stopwatch.lap(DATA)
            with self.sync.microbatch(last=number == len(pieces)):
                with autocast(self.config.precision, source.share.device):
                    outcome = self.workload.evaluate(model, batch)
                self.ledger.add(piece.samples, outcome.loss, self.workload.count_correct(outcome))
                stopwatch.lap(FORWARD)
                loss = outcome.loss if piece.weight == 1 else outcome.loss * piece.weight
                stopwatch.watch_backward(loss)
                loss.backward()
                stopwatch.lap(BACKWARD)
        self.sync.step(self.config.clip_norm)
        stopwatch.lap(OPTIMISER)
        self.ledger.end_step(epoch, stopwatch.end())
        return True

    def total_steps(self) -> int | None:
        """Steps of the whole run, or None where only going through the data tells."""
        if self.config.steps is not None:
            return self.config.steps
        per_epoch = self.source.steps()
        return None if per_epoch is None else self.sync.comm.smallest(per_epoch) * (self.config.epochs or 1)

    def _epoch_end(self, step: int, total: int | None) -> int | None:
        """The step at which an epoch (or the run) ends, agreed on by the ranks; None where only the data tells."""
        per_epoch = self.source.steps()
        if per_epoch is None:
            return total
        end = step + self.sync.comm.smallest(per_epoch)
        return end if total is None else min(end, total)

    def _ended(self, pieces: list[Piece] | None) -> bool:
        """Whether the data has ended on any rank. Data of unknown length costs one small message a step for this."""
        if self.source.steps() is not None:
            return pieces is None
        self.stopwatch.lap(DATA)  # Waiting for a rank whose data is late is not getting one's own.
        ended = self.sync.comm.smallest(int(pieces is not None)) == 0
        self.stopwatch.lap(AGREE)
        return ended
