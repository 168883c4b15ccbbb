"""Gradient noise scale of a run: the estimate over its last half, its spread over windows, and its curve over steps.

The noise scale is tr Σ ÷ |G|² (McCandlish et al., "An Empirical Model of Large-Batch Training", 2018): the batch, in
samples, at which the noise of the gradient is as large as the gradient. Estimates of both from one step are unbiased,
but vary a lot, and their ratio is biased. So they are averaged separately over many steps, and the ratio is taken last.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.curves import steps_per_epoch
from paceline.analysis.statistics import LEVEL
from paceline.records import RunRecord
from paceline.records.events import LogEvent, NoiseFigures

SMOOTHED_SHARE = 0.1
"""Share of the measured steps that the moving averages of the curve cover."""
GROUPS = 10
"""Most groups of windows from which the spread is computed."""
FEWEST_GROUPS = 4


@dataclass(frozen=True)
class NoiseScale:
    """Gradient noise scale of a run, in samples."""

    value: float
    low: float | None
    high: float | None
    """Interval from the spread over windows; None for too few windows. `high` is infinite if the gradient may be zero
    within its noise."""
    steps: int
    """Measured steps."""


@dataclass(frozen=True)
class NoiseCurve:
    """Noise scale over the steps of a run, from exponential moving averages of its two parts."""

    steps: list[int]
    values: list[float]
    """NaN where the average of |G|² is not positive."""
    steps_per_epoch: int | None = None
    """None if it is unknown."""


def noise_scale(run: RunRecord) -> NoiseScale | None:
    """Return the noise scale over the last half of the measured steps, since it grows while a model learns.

    None if it was not measured, or if |G|² is not positive: then the gradient is smaller than its noise.
    """
    windows = _last_half([noise for _, noise in _measured(run)])
    ratio = _ratio(windows)
    if ratio is None:
        return None
    low, high = _interval(windows, ratio)
    return NoiseScale(ratio, low, high, sum(window.steps for window in windows))


def epochs_factor(noise_scale: float, batch: float, reference: float) -> float:
    """Return the epochs that a batch needs ÷ those of a reference batch for the same loss, at suitable learning rates.

    A batch B needs 1 + B ÷ noise scale times the samples that the smallest one needs (McCandlish et al., 2018,
    equations 2.11 and 5.2).
    """
    return (noise_scale + batch) / (noise_scale + reference)


def noise_curve(run: RunRecord) -> NoiseCurve:
    """Return the smoothed noise scale at the end of each window in which it was measured.

    Both averages start empty and are divided by their total weight, so the first windows do not bias them.
    """
    measured = _measured(run)
    memory = max(1.0, SMOOTHED_SHARE * sum(noise.steps for _, noise in measured))
    trace = gradient_sq = 0.0
    steps, values = [], []
    for step, noise in measured:
        kept = math.exp(-noise.steps / memory)
        trace = kept * trace + (1 - kept) * noise.trace  # The weights of both are the same, and cancel in the ratio.
        gradient_sq = kept * gradient_sq + (1 - kept) * noise.gradient_sq
        steps.append(step)
        values.append(trace / gradient_sq if trace > 0 and gradient_sq > 0 else math.nan)
    return NoiseCurve(steps, values, steps_per_epoch(run))


def _measured(run: RunRecord) -> list[tuple[int, NoiseFigures]]:
    return [(log.step, log.noise) for log in run.events_of(LogEvent) if log.noise is not None]


def _last_half(windows: Sequence[NoiseFigures]) -> list[NoiseFigures]:
    total, kept = sum(window.steps for window in windows), list[NoiseFigures]()
    for window in reversed(windows):
        if sum(own.steps for own in kept) >= total / 2:
            break
        kept.append(window)
    return kept[::-1]


def _ratio(windows: Sequence[NoiseFigures]) -> float | None:
    trace = sum(window.trace * window.steps for window in windows)
    gradient_sq = sum(window.gradient_sq * window.steps for window in windows)
    return trace / gradient_sq if trace > 0 and gradient_sq > 0 else None


def _interval(windows: Sequence[NoiseFigures], ratio: float) -> tuple[float | None, float | None]:
    """Return the interval of the ratio by the jackknife over groups of windows, on the inverse, which can reach 0."""
    from scipy.special import stdtrit  # Here, since importing it takes time that most callers do not need.

    count = min(GROUPS, len(windows))
    if count < FEWEST_GROUPS:
        return None, None
    groups = [windows[len(windows) * at // count : len(windows) * (at + 1) // count] for at in range(count)]
    without = [_inverse([own for other in groups if other is not group for own in other]) for group in groups]
    spread = math.sqrt((count - 1) * statistics.pvariance(without))
    half = float(stdtrit(count - 1, (1 + LEVEL) / 2)) * spread
    low, high = 1 / ratio - half, 1 / ratio + half
    return 1 / high, 1 / low if low > 0 else math.inf


def _inverse(windows: Sequence[NoiseFigures]) -> float:
    trace = sum(window.trace * window.steps for window in windows)
    return sum(window.gradient_sq * window.steps for window in windows) / trace if trace else math.nan
