"""The training loop: from the first batch to the summary, on one rank."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.analysis.timing import WindowTime
from paceline.config import RunConfig
from paceline.errors import WorkloadError
from paceline.measure.steps import BACKWARD, DATA, FORWARD, UPDATE, StepClock
from paceline.training.ledger import Ledger
from paceline.training.precision import autocast
from paceline.training.sync import Sync
from paceline.workloads.batches import Piece, Source
from paceline.workloads.workload import Workload

_ONE_SHOT = "give a data set or something that can be iterated again, not a generator that runs once"

WARM_UP_STEPS = 5
"""The first window: reducers build their buckets, allocators and caches fill. Its time never counts."""
WINDOW_S = 0.5
"""Ranks exchange their losses this often, not more: a message every few short steps would cost more than all else."""
MOST_LOGS_PER_WINDOW = 50

Report = Callable[..., None]
"""Where rank 0's account of the run goes: `report(event, **values)`; nowhere on the other ranks."""


@dataclass
class Loop:
    """Trains a workload through a `Sync`."""

    config: RunConfig
    workload: Workload
    sync: Sync
    source: Source
    clock: StepClock
    ledger: Ledger
    report: Report
    windows: list[WindowTime] = field(default_factory=list)
    """What was timed so far."""
    _logs_per_window: int = 1

    def train(self) -> None:
        """Trains for the epochs or steps asked for."""
        step = 0
        total = self.total_steps()
        self.report("start", steps=total, steps_per_epoch=self.source.expected_steps, dropped=self.source.dropped)
        for epoch in itertools.count():
            before, end, ended = step, self._epoch_end(step, total), False
            steps = self.source.epoch(epoch)
            while not ended and step != end:
                window = self._window_end(step) - step
                count = window if end is None else min(window, end - step)
                began = time.perf_counter()
                trained = self._train_steps(epoch, steps, count)
                self.sync.strategy.finish()
                self._wait_for_device()
                wall_s = time.perf_counter() - began
                ended = trained < count
                if trained:
                    step += trained
                    self._report_window(epoch, step, wall_s)
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
        clock, source, model = self.clock, self.source, self.sync.model
        clock.begin()
        pieces = next(steps, None)
        if self._ended(pieces):
            return False
        assert pieces is not None
        for number, piece in enumerate(pieces, start=1):
            batch = source.fetch(piece)
            clock.lap(DATA)
            with self.sync.microbatch(last=number == len(pieces)):
                with autocast(self.config.precision, source.share.device):
                    outcome = self.workload.evaluate(model, batch)
                self.ledger.add(piece.samples, outcome)
                clock.lap(FORWARD)
                loss = outcome.loss if piece.weight == 1 else outcome.loss * piece.weight
                loss.backward()
                clock.lap(BACKWARD)
        self.sync.step(self.config.clip_norm)
        clock.lap(UPDATE)
        self.ledger.end_step(epoch, clock.end())
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
        return self.sync.comm.smallest(int(pieces is not None)) == 0

    def _window_end(self, step: int) -> int:
        """Where a window ends: after whole periods, and so many steps that closing it costs next to nothing."""
        period = self.sync.strategy.period
        if step == 0:
            return -(-WARM_UP_STEPS // period) * period
        size = -(-self.config.log_every * self._logs_per_window // period) * period
        return step + size - step % size

    def _report_window(self, epoch: int, step: int, wall_s: float) -> None:
        window = self.ledger.close_window(wall_s, self.sync.comm)
        self.windows.append(WindowTime(len(window.losses), window.wall_s))
        log_s = window.wall_s * self.config.log_every / len(window.losses)
        self._logs_per_window = max(1, min(MOST_LOGS_PER_WINDOW, int(WINDOW_S / log_s)))
        self.report(
            "log",
            epoch=epoch,
            step=step,
            wall_s=window.wall_s,
            losses=window.losses,
            samples=window.samples,
            correct=window.correct,
        )

    def _wait_for_device(self) -> None:
        if self.source.share.device.type == "cuda":
            torch.cuda.synchronize(self.source.share.device)


def silent(event: str, **values: Any) -> None:
    """The report of every rank but 0."""
