"""Keeps the books of a run on one rank: each step's times, loss and right answers, without making the step wait.

Losses and outputs stay on the device until `settle`, which runs between steps, every half second or at the end of a
window, and writes them to the record.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.comm.group import Comm
from paceline.measure.steps import StepClock
from paceline.records import StepRow, StepWriter
from paceline.workloads.workload import Outcome, Workload

SETTLE_EVERY_S = 0.5
NOT_COUNTED = -1


@dataclass
class _Open:
    """A step whose figures are still on the device."""

    epoch: int
    samples: int
    times: Any
    losses: list[tuple[int, Tensor]]
    correct: list[Tensor]


@dataclass(frozen=True)
class Window:
    """The global figures of a few steps."""

    losses: list[float]
    """The global mean loss of each step."""
    samples: int
    correct: int | None
    wall_s: float
    """The time it took the slowest rank, the same number on all of them."""


class Ledger:
    """The steps of one rank."""

    def __init__(self, clock: StepClock, workload: Workload, writer: StepWriter) -> None:
        self._clock = clock
        self._workload = workload
        self._writer = writer
        self._open: list[_Open] = []
        self._losses: list[tuple[int, Tensor]] = []
        self._correct: list[Tensor] = []
        self._window: list[StepRow] = []
        self._settled_s = time.perf_counter()
        self.step = 0
        """The next step's number."""

    def add(self, samples: int, outcome: Outcome) -> None:
        """Notes one micro-batch."""
        self._losses.append((samples, outcome.loss.detach()))
        correct = self._workload.count_correct(outcome)
        if correct is not None:
            self._correct.append(correct)

    def end_step(self, epoch: int, times: Any) -> None:
        """Closes a step of the micro-batches noted since the last one."""
        samples = sum(samples for samples, _ in self._losses)
        self._open.append(_Open(epoch, samples, times, self._losses, self._correct))
        self._losses, self._correct = [], []
        if time.perf_counter() - self._settled_s > SETTLE_EVERY_S:
            self.settle()

    def settle(self) -> None:
        """Reads what is still on the device and writes it to the record."""
        rows = [self._row(number, step) for number, step in enumerate(self._open, start=self.step)]
        self._writer.write(rows)
        self._window += rows
        self.step += len(self._open)
        self._open = []
        self._settled_s = time.perf_counter()

    def close_window(self, wall_s: float, comm: Comm) -> Window:
        """Adds up, over the ranks, the steps since the last window; every rank calls it after the same steps."""
        self.settle()
        rows, self._window = self._window, []
        own = [[row.loss * row.samples, row.samples, row.correct] for row in rows]
        losses, samples, correct = comm.sum(torch.tensor(own, dtype=torch.float64)).unbind(1)
        counted = all(row.correct != NOT_COUNTED for row in rows)
        return Window(
            losses=(losses / samples).tolist(),
            samples=int(samples.sum()),
            correct=int(correct.sum()) if counted else None,
            wall_s=comm.largest(wall_s),
        )

    def _row(self, number: int, step: _Open) -> StepRow:
        loss = sum(samples * float(loss) for samples, loss in step.losses) / step.samples
        correct = sum(int(count) for count in step.correct) if step.correct else NOT_COUNTED
        return StepRow(number, step.epoch, step.samples, *self._clock.read(step.times), loss, correct)
