"""Data of plots over the steps of a run: losses, evaluations, learning rate, step times per rank, differences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from paceline.analysis.divergence import divergence_of
from paceline.analysis.steps.timing import losses_of, windows_of
from paceline.records import RunRecord
from paceline.records.events import EvaluationEvent, LogEvent, StartEvent
from paceline.records.summary import Divergence


@dataclass(frozen=True)
class LossCurve:
    """Global mean loss of every step, with the epoch and training time of each step."""

    losses: list[float]
    """NaN where a loss is not finite."""
    epochs: list[float] | None
    """Epochs completed at the start of the step, with fractions; None if the length of an epoch is unknown."""
    wall_s: list[float]
    """Training time at the end of the step: wall time of the windows, without the time between windows."""
    divergence: Divergence | None
    """None if the run has not diverged."""


@dataclass(frozen=True)
class EvaluatedPoint:
    """Evaluation of a run, with the training that came before it."""

    step: int
    """Steps done."""
    epochs: float | None
    """Epochs done, with fractions; None if the length of an epoch is unknown."""
    train_s: float
    """Training time until then: wall time of the windows, without evaluations."""
    loss: float
    """NaN if it is not finite."""
    accuracy: float | None
    """None for a workload that does not define it."""


@dataclass(frozen=True)
class LearningRateCurve:
    """Learning rate of the steps for which it was recorded: of all, or of the last step of each window."""

    steps: list[int]
    """Numbers of these steps, counted from 0."""
    rates: list[float]
    """Learning rate of the first parameter group."""


def validation_curve(run: RunRecord) -> list[EvaluatedPoint]:
    """Return a run's evaluations in the order of steps; without `--eval-every`, the one at the end."""
    per_epoch = steps_per_epoch(run)
    logs = run.events_of(LogEvent)
    times = dict(zip([log.step for log in logs], itertools.accumulate(log.wall_s for log in logs), strict=True))
    found: dict[int, EvaluatedPoint] = {}
    for event in run.events_of(EvaluationEvent):
        step = event.step if event.step is not None else max(times, default=0)
        found[step] = EvaluatedPoint(
            step=step,
            epochs=step / per_epoch if per_epoch else None,
            train_s=max((time_s for end, time_s in times.items() if end <= step), default=0.0),
            loss=math.nan if event.test.loss is None else event.test.loss,
            accuracy=event.test.accuracy,
        )
    return [found[step] for step in sorted(found)]


def result_at(curve: Sequence[EvaluatedPoint], train_s: float) -> EvaluatedPoint | None:
    """Return the last evaluation within so many seconds of training; None if there was none by then.

    Nothing is interpolated: it is the result of weights that the run had at that time.
    """
    return max((point for point in curve if point.train_s <= train_s), key=lambda point: point.step, default=None)


def learning_rate_curve(run: RunRecord) -> LearningRateCurve:
    """Return a run's learning rate, as far as it was recorded."""
    known = [pair for log in run.events_of(LogEvent) for pair in _rates_of(log)]
    return LearningRateCurve(steps=[step for step, _ in known], rates=[rate for _, rate in known])


def highest_rate(runs: Iterable[RunRecord]) -> float | None:
    """Return the highest learning rate that some runs reached; None if it was not recorded."""
    return max((rate for run in runs for rate in learning_rate_curve(run).rates), default=None)


def _rates_of(log: LogEvent) -> Iterator[tuple[int, float]]:
    """Yield steps of a window with their learning rates: all, the ends of a constant one, or only the last."""
    steps = range(log.step - len(log.losses), log.step)
    if log.lrs is not None and len(log.lrs) == len(steps):
        yield from zip(steps, log.lrs, strict=True)
    elif log.lrs:
        yield steps[0], log.lrs[0]
        yield steps[-1], log.lrs[0]
    elif log.lr is not None:
        yield steps[-1], log.lr


def steps_per_epoch(run: RunRecord) -> int | None:
    """Return the steps of an epoch; None if they are unknown."""
    starts = run.events_of(StartEvent)
    return starts[0].steps_per_epoch if starts else None


def loss_curve(run: RunRecord) -> LossCurve:
    """Return a run's losses. Times are known only per window, so the steps of a window share its time equally."""
    per_epoch = steps_per_epoch(run)
    losses = losses_of(run)
    step_times = [window.wall_s / window.steps for window in windows_of(run) for _ in range(window.steps)]
    return LossCurve(
        losses=losses,
        epochs=[step / per_epoch for step in range(len(losses))] if per_epoch else None,
        wall_s=list(itertools.accumulate(step_times)),
        divergence=divergence_of(run),
    )


def step_times(run: RunRecord) -> dict[int, list[float]]:
    """Return the seconds of every step, by rank."""
    return {rank: steps.total_s.tolist() for rank, steps in sorted(run.steps.items()) if len(steps)}


def thinned(values: Sequence[float], most: int) -> list[int]:
    """Return the indices of at most `most` points that preserve the shape of a curve: both ends and local extremes.

    The points are divided into buckets of equal length. Each bucket keeps its minimum, its maximum and, so that gaps
    stay visible, its first non-finite point. The first point is always kept, since the first step of a run is unusual.
    """
    if len(values) <= most:
        return list(range(len(values)))
    kept = {0, len(values) - 1}
    buckets = max(1, (most - 2) // 3)
    edges = [len(values) * bucket // buckets for bucket in range(buckets + 1)]
    for start, end in itertools.pairwise(edges):
        finite = [index for index in range(start, end) if math.isfinite(values[index])]
        if finite:
            kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        if len(finite) < end - start:
            kept.add(next(index for index in range(start, end) if not math.isfinite(values[index])))
    return sorted(kept)


def relative_differences(run: RunRecord, reference: RunRecord) -> list[float]:
    """Return the relative difference of two runs' losses for every common step; 0 if they are bitwise equal."""
    return [relative_difference(a, b) for a, b in zip(losses_of(run), losses_of(reference), strict=False)]


def relative_difference(one: float, other: float) -> float:
    """Return the difference of two values ÷ the larger of them; infinite if exactly one is NaN."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if math.isnan(one) or math.isnan(other):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))
