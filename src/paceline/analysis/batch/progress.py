"""Progress of training: the loss and accuracy that a run had reached after some training time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.steps.timing import losses_of
from paceline.records import RunRecord
from paceline.records.events import LogEvent, StartEvent


@dataclass(frozen=True)
class ProgressPoint:
    """State of a run at the end of a window of steps."""

    step: int
    """Steps done."""
    wall_s: float
    """Training time so far: wall time of the windows."""
    samples: int
    """Samples trained in the window."""
    loss: float
    """Mean training loss over the steps of the window; NaN if one is not finite."""
    accuracy: float | None
    """Share of the window's samples with correct predictions; None for a workload that does not define it."""


@dataclass(frozen=True)
class Progress:
    """Training loss and accuracy of a run over the last epoch's worth of samples before a time."""

    loss: float | None
    """None if it is not finite or was not reported."""
    accuracy: float | None


def progress_curve(run: RunRecord) -> list[ProgressPoint]:
    """Return the training loss and accuracy of every window of a run."""
    losses, found, wall_s, done = losses_of(run), list[ProgressPoint](), 0.0, 0
    for log in run.events_of(LogEvent):
        own = losses[done : done + len(log.losses)]
        wall_s, done = wall_s + log.wall_s, done + len(log.losses)
        accuracy = log.correct / log.samples if log.correct is not None and log.samples else None
        loss = sum(own) / len(own) if own else math.nan
        found.append(ProgressPoint(log.step, wall_s, log.samples, loss, accuracy))
    return found


def training_time(run: RunRecord) -> float:
    """Return the training time of a run in seconds: wall time of its windows."""
    return sum(log.wall_s for log in run.events_of(LogEvent))


def progress_at(run: RunRecord, time_s: float) -> Progress | None:
    """Return the progress after a training time; None if no window had ended by then.

    The mean is over the windows before it that have an epoch's worth of samples together, so that runs with many short
    windows are no noisier than runs with one window per epoch.
    """
    curve = [point for point in progress_curve(run) if point.wall_s <= time_s * (1 + 1e-9)]
    return _last_epoch(curve, _samples_per_epoch(run)) if curve else None


def _samples_per_epoch(run: RunRecord) -> float:
    starts = run.events_of(StartEvent)
    steps, batch = (starts[0].steps_per_epoch if starts else None), run.topology.batch
    return math.inf if steps is None or batch is None else steps * batch


def _last_epoch(curve: Sequence[ProgressPoint], samples: float) -> Progress:
    kept: list[ProgressPoint] = []
    for point in reversed(curve):
        if kept and sum(own.samples for own in kept) + point.samples > samples:
            break
        kept.append(point)
    total = sum(point.samples for point in kept)
    loss = sum(point.loss * point.samples for point in kept) / total if total else math.nan
    known = [point.accuracy * point.samples for point in kept if point.accuracy is not None]
    accuracy = sum(known) / total if total and len(known) == len(kept) else None
    return Progress(loss if math.isfinite(loss) else None, accuracy)
