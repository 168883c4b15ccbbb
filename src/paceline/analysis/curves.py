"""Data of plots over the steps of a run: losses, step times per rank, differences; thinned without losing extremes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.divergence import divergence_of
from paceline.analysis.steps.timing import losses_of, windows_of
from paceline.records import RunRecord
from paceline.records.events import StartEvent
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


def loss_curve(run: RunRecord) -> LossCurve:
    """Return a run's losses. Times are known only per window, so the steps of a window share its time equally."""
    starts = run.events_of(StartEvent)
    per_epoch = starts[0].steps_per_epoch if starts else None
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
