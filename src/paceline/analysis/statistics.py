"""Estimates with intervals from a few repeats, and paired comparisons between them.

Times and ratios are analysed as logarithms: a disturbance can double a step time but never halve it, and the interval
of a ratio should not depend on which side is the numerator. Intervals are Student's t intervals over repeats, not
steps: steps of one run are correlated, so intervals over steps would be too narrow. Fewer than three repeats give no
interval: with one degree of freedom Student's t is 12.7, so two repeats that both show a factor of three would have an
interval that contains 1. The estimate has the value of each repeat instead. From three repeats on, the variance may be
combined with what else is known about it (`moderated_variance`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.analysis.moderated_variance import Variance, moderated

LEVEL = 0.95
"""Confidence level of the intervals in tables."""
MIN_REPEATS = 3
"""Fewest repeats that give an interval."""
VAGUE = 10.0
"""Ratio of the ends of an interval from which it is too wide to be useful."""
MAX_DEGREES_OF_FREEDOM = 200
"""Degrees of freedom from which Student's t equals the normal distribution at the precision of the tables."""


@dataclass(frozen=True)
class Estimate:
    """Estimate of a value from repeats."""

    value: float
    """Median."""
    low: float | None
    high: float | None
    """`low` to `high` is the interval; None for fewer than `MIN_REPEATS` repeats, or without paired repeats."""
    repeats: int
    each: tuple[float, ...] = ()
    """Values of the repeats in their order where they are too few for an interval; empty where there is one."""

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as JSON values."""
        return {"value": self.value, "low": self.low, "high": self.high, "repeats": self.repeats, "each": [*self.each]}

    def spans(self, value: float) -> bool:
        """Return whether the interval contains a value; True without an interval."""
        return self.low is None or self.high is None or self.low <= value <= self.high

    def repeats_contradict(self, value: float) -> bool:
        """Return whether repeats too few for an interval lie on both sides of a value, or at it."""
        return bool(self.each) and min(self.each) <= value <= max(self.each)

    def within(self, low: float, high: float) -> bool:
        """Return whether the whole interval lies between two bounds; False without an interval."""
        return self.low is not None and self.high is not None and low <= self.low and self.high <= high

    @property
    def is_vague(self) -> bool:
        """Whether the interval is too wide to be useful; for positive values."""
        return self.low is not None and self.high is not None and self.high >= VAGUE * self.low

    def scaled(self, by: float) -> Estimate:
        """Return the estimate multiplied by a positive factor."""
        low, high = self.low, self.high
        return replace(
            self,
            value=self.value * by,
            low=None if low is None else low * by,
            high=None if high is None else high * by,
            each=tuple(value * by for value in self.each),
        )

    def inverse(self) -> Estimate:
        """Return the reciprocal of a positive estimate."""
        low = None if self.high is None else 1 / self.high
        high = None if self.low is None else 1 / self.low if self.low else math.inf
        return replace(self, value=1 / self.value, low=low, high=high, each=tuple(1 / value for value in self.each))

    def complement(self) -> Estimate:
        """Return 1 minus the estimate."""
        low = None if self.high is None else 1 - self.high
        high = None if self.low is None else 1 - self.low
        return replace(self, value=1 - self.value, low=low, high=high, each=tuple(1 - value for value in self.each))


def median_time(values: Iterable[float]) -> float:
    """Return the median of positive values; for an even number, the geometric mean of the middle two.

    The median of rates is then the reciprocal of the median of times, so both sort tables in the same order.
    """
    return _median(list(values), math.log, math.exp)


def estimate_times(values: Sequence[float], level: float = LEVEL, prior: Variance | None = None) -> Estimate | None:
    """Estimate positive values (times, rates, ratios), with an interval from their logarithms; None without values.

    `prior` is what is known about the variance of the logarithms besides these values.
    """
    return _estimate(values, level, math.log, math.exp, prior=prior)


def estimate_levels(values: Sequence[float], level: float = LEVEL, shared_variance: float = 0.0) -> Estimate | None:
    """Estimate values that may be zero or negative (losses, accuracies, differences); None without values."""
    return _estimate(values, level, float, float, shared_variance=shared_variance)


def estimate_shares(values: Sequence[float], level: float = LEVEL) -> Estimate | None:
    """Estimate shares, with an interval limited to 0 and 1; None without values."""
    return limited(estimate_levels(values, level), 0.0, 1.0)


def estimate_losses(values: Sequence[float]) -> Estimate | None:
    """Estimate losses; None without values. The interval has no negative values, unless a loss is negative."""
    return limited(estimate_levels(values), -math.inf if min(values, default=0.0) < 0 else 0.0)


def limited(estimate: Estimate | None, least: float, most: float = math.inf) -> Estimate | None:
    """Return an estimate with its interval limited to the values that are possible."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return estimate
    return replace(estimate, low=max(least, estimate.low), high=min(most, estimate.high))


def paired_ratio(
    one: Mapping[Any, float], other: Mapping[Any, float], level: float = LEVEL, prior: Variance | None = None
) -> Estimate | None:
    """Estimate the ratio of `one` to `other` from the repeats that both have; `prior` is as for `estimate_times`.

    Without common repeats, return the ratio of the medians, without an interval; None if either has no values.
    """
    common = [key for key in one if key in other]
    if common:
        return estimate_times([one[key] / other[key] for key in common], level, prior)
    if not one or not other:
        return None
    return Estimate(median_time(one.values()) / median_time(other.values()), None, None, 0)


def paired_difference(
    one: Mapping[Any, float], other: Mapping[Any, float], level: float = LEVEL, *, shared_variance: float = 0.0
) -> Estimate | None:
    """Estimate `one` minus `other` from the repeats that both have; None if there are none.

    `shared_variance` is the variance of an error that all repeats have in common, which repeating does not reduce.
    """
    return estimate_levels([one[key] - other[key] for key in one if key in other], level, shared_variance)


def overhead_share(with_overhead: Sequence[float], without: Sequence[float]) -> Estimate | None:
    """Estimate the relative growth of values from pairs: median with interval; None without pairs.

    The two values of a pair were measured right after each other, so slow changes of the machine's load affect both. A
    disturbance of only one value makes an outlier; the interval is therefore that of a median, from order statistics.
    """
    ratios = sorted(one / other for one, other in zip(with_overhead, without, strict=True))
    if not ratios:
        return None
    outside = _outside_median_interval(len(ratios))
    low, high = (None, None) if outside is None else (ratios[outside] - 1, ratios[-1 - outside] - 1)
    return Estimate(median_time(ratios) - 1, low, high, len(ratios))


def _outside_median_interval(count: int) -> int | None:
    """Return how many of `count` sorted values on each side lie outside the interval of the median; None if too few.

    Each value is below the true median with probability 0.5, so the number of such values is binomial.
    """
    import numpy as np
    from scipy.special import bdtr  # Imported here because scipy takes 0.2 s, and commands that fail need none of it.

    below = bdtr(np.arange(count), count, 0.5)
    outside = int(np.count_nonzero(below <= (1 - LEVEL) / 2)) - 1
    return outside if outside >= 0 else None


def _estimate(
    values: Sequence[float],
    level: float,
    transform: Callable[[float], float],
    inverse: Callable[[float], float],
    *,
    shared_variance: float = 0.0,
    prior: Variance | None = None,
) -> Estimate | None:
    if not values:
        return None
    median, repeats = _median(values, transform, inverse), len(values)
    if repeats < MIN_REPEATS:
        return Estimate(median, None, None, repeats, tuple(values))
    from scipy.special import stdtrit  # Imported here for the same reason as `bdtr`.

    scaled = [transform(value) for value in values]
    centre = statistics.fmean(scaled)
    between = moderated(Variance(statistics.variance(scaled), repeats - 1), prior)
    variance = between.value / repeats
    freedom = _degrees_of_freedom(variance, shared_variance, between.freedom)
    half = float(stdtrit(freedom, (1 + level) / 2)) * math.sqrt(variance + shared_variance)
    # The centre is a mean and the value a median: with outliers the interval is widened to contain the value.
    return Estimate(median, min(inverse(centre - half), median), max(inverse(centre + half), median), repeats)


def _median(values: Sequence[float], transform: Callable[[float], float], inverse: Callable[[float], float]) -> float:
    low, high = statistics.median_low(values), statistics.median_high(values)
    return float(low if low == high else inverse((transform(low) + transform(high)) / 2))


def _degrees_of_freedom(variance: float, known: float, freedom: float) -> float:
    """Return the degrees of freedom of an estimated plus a known variance (Welch–Satterthwaite), rounded down."""
    if not known:
        return freedom
    if variance < known * 1e-6:
        return MAX_DEGREES_OF_FREEDOM
    return min(MAX_DEGREES_OF_FREEDOM, int(freedom * (1 + known / variance) ** 2))
