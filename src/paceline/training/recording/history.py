"""Figures of a run before the step at which it resumes, the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from paceline.analysis.steps.timing import WindowTime, window_of
from paceline.records.resumed import History
from paceline.records.value_types import Count, Seconds


class TrainedTotals(msgspec.Struct, kw_only=True):
    """Sums over all samples that a run has trained, on all ranks; a checkpoint keeps them."""

    samples: Count = 0
    loss_sum: float = 0.0
    """Sum of the losses of all samples, without those of skipped steps."""
    with_loss: Count = 0
    """Samples in that sum."""
    correct: Count | None = 0
    """Correct predictions; None for a workload that does not define them."""
    train_s: Seconds = 0.0
    """Seconds of training, on the slowest rank of each window."""

    def add(self, *, samples: int, loss_sum: float, with_loss: int, correct: int | None, wall_s: float) -> None:
        """Add the sums of a window."""
        self.samples += samples
        self.loss_sum += loss_sum
        self.with_loss += with_loss
        self.correct = None if correct is None or self.correct is None else self.correct + correct
        self.train_s += wall_s

    @property
    def average_loss(self) -> float | None:
        """Mean loss over all samples; None if no loss is known."""
        return self.loss_sum / self.with_loss if self.with_loss else None

    @property
    def accuracy(self) -> float | None:
        """Share of correct predictions; None for a workload that does not define them."""
        return None if self.correct is None or not self.with_loss else self.correct / self.with_loss


class RecordedWindows(msgspec.Struct, frozen=True, kw_only=True):
    """Windows that the record has of the steps before; empty if the run resumes in another folder."""

    windows: list[WindowTime] = []
    losses: list[float | None] = []
    skipped: list[Count] = []
    time_s: Seconds = 0.0
    """Time at which the clock of the record goes on."""
    redone: Count = 0
    """Steps that were trained after the checkpoint and are lost."""

    @classmethod
    def of(cls, history: History) -> RecordedWindows:
        """Return the windows of a record that this host has read."""
        logs = history.logs
        return cls(
            windows=[window_of(log) for log in logs],
            losses=[loss for log in logs for loss in log.losses],
            skipped=[step for log in logs for step in log.skipped],
            time_s=history.time_s,
            redone=history.redone,
        )


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """State of the windows of a run at the step at which it resumes."""

    step: int
    epoch: int
    epoch_ends: Sequence[int]
    totals: TrainedTotals
    recorded: RecordedWindows
