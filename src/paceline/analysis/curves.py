"""What a figure draws over the steps of a run: losses, times per rank, differences; thinned without losing extremes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.steps.timing import losses_of, windows_of
from paceline.records import RunRecord


@dataclass(frozen=True)
class LossCurve:
    """The global mean loss of every step, and three ways to say when that was."""

    losses: list[float]
    """Not a number where the run has diverged."""
    epochs: list[float] | None
    """Passes over the training data when the step began; None where the length of an epoch is not known."""
    wall_s: list[float]
    """Training time until the step's end: the windows' wall time, without what was spent on reporting between them."""

    @property
    def diverged_step(self) -> int | None:
        """The first step whose loss is not a number."""
        return next((step for step, loss in enumerate(self.losses) if not math.isfinite(loss)), None)


def loss_curve(run: RunRecord) -> LossCurve:
    """A run's losses. Losses are known per step but times per window, so a window's time is shared by its steps."""
    starts = run.events_of("start")
    per_epoch = starts[0]["steps_per_epoch"] if starts else None
    losses = losses_of(run)
    step_times = [window.wall_s / window.steps for window in windows_of(run) for _ in range(window.steps)]
    return LossCurve(
        losses=losses,
        epochs=[step / per_epoch for step in range(len(losses))] if per_epoch else None,
        wall_s=list(itertools.accumulate(step_times)),
    )


def step_times(run: RunRecord) -> dict[int, list[float]]:
    """Seconds of every step, by rank."""
    return {rank: steps.total_s.tolist() for rank, steps in sorted(run.steps.items()) if len(steps)}


def thinned(values: Sequence[float], most: int) -> list[int]:
    """Which points to keep so that a curve of at most `most` points looks the same: both ends, and every local extreme.

    The points fall into buckets of equal length; each keeps its least, its greatest and, so that a gap stays a gap, the
    first that is not a number. The first point is always kept: the first step of a run is a story of its own.
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
    """By how much two runs' losses differ in every step that both have; 0 where they are equal to the last bit."""
    return [relative_difference(a, b) for a, b in zip(losses_of(run), losses_of(reference), strict=False)]


def relative_difference(one: float, other: float) -> float:
    """The difference of two figures ÷ the larger of them; infinite where only one of them is a number."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if math.isnan(one) or math.isnan(other):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))
