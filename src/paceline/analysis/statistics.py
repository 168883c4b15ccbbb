"""Estimates from a few repeats, with intervals, and paired comparisons between them.

Times and ratios are handled as logarithms: a machine that is disturbed makes a step twice as long, never half as long,
and the interval of a ratio should not depend on which side is called the first. Intervals are Student's, over repeats:
the steps of one run are correlated, so counting them would promise a certainty that is not there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

LEVEL = 0.95
"""Confidence of the intervals shown in tables."""
VAGUE = 10.0
"""An interval of a ratio, or of times, whose ends are as many times apart says nothing."""
MOST_FREEDOM = 200
"""Beyond this, Student's t is the normal distribution for all that a table shows."""


@dataclass(frozen=True)
class Estimate:
    """A figure over repeats."""

    value: float
    """The median."""
    low: float | None
    high: float | None
    """The interval; None from a single repeat, or where nothing is paired."""
    repeats: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"value": self.value, "low": self.low, "high": self.high, "repeats": self.repeats}

    def spans(self, value: float) -> bool:
        """Whether the interval leaves a value possible; without an interval everything is."""
        return self.low is None or self.high is None or self.low <= value <= self.high

    def within(self, low: float, high: float) -> bool:
        """Whether the whole interval lies between two bounds."""
        return self.low is not None and self.high is not None and low <= self.low and self.high <= high

    @property
    def is_vague(self) -> bool:
        """Whether the ends of its interval are too far apart to say anything, for what is never 0 or less."""
        return self.low is not None and self.high is not None and self.high >= VAGUE * self.low

    def scaled(self, by: float) -> Estimate:
        """So many times as much, for a number above 0."""
        low, high = self.low, self.high
        return replace(
            self,
            value=self.value * by,
            low=None if low is None else low * by,
            high=None if high is None else high * by,
        )

    def inverse(self) -> Estimate:
        """One over it, for what is above 0."""
        low = None if self.high is None else 1 / self.high
        high = None if self.low is None else 1 / self.low if self.low else math.inf
        return replace(self, value=1 / self.value, low=low, high=high)


def median_time(values: Iterable[float]) -> float:
    """The median of positive figures; between two in the middle, their geometric mean.

    The median of rates is then one over that of times, and tables sorted by the one are sorted by the other.
    """
    return _median(list(values), math.log, math.exp)


def of_times(values: Sequence[float], level: float = LEVEL) -> Estimate | None:
    """The median of positive figures (times, rates, ratios), with an interval from their logarithms."""
    return _estimate(values, level, math.log, math.exp)


def of_levels(values: Sequence[float], level: float = LEVEL, shared_variance: float = 0.0) -> Estimate | None:
    """The median of figures that may be zero or negative (losses, accuracies, differences), with an interval."""
    return _estimate(values, level, float, float, shared_variance)


def of_shares(values: Sequence[float], level: float = LEVEL) -> Estimate | None:
    """As `of_levels`, for shares of one, whose interval ends there."""
    estimate = of_levels(values, level)
    if estimate is None or estimate.low is None or estimate.high is None:
        return estimate
    return replace(estimate, low=max(0.0, estimate.low), high=min(1.0, estimate.high))


def paired_ratio(one: Mapping[Any, float], other: Mapping[Any, float], level: float = LEVEL) -> Estimate | None:
    """How many times `other`'s figure `one`'s is, from the repeats that both have.

    What was not measured in the same repeat cannot be paired: then it is the ratio of the medians, without an interval.
    """
    common = [key for key in one if key in other]
    if common:
        return of_times([one[key] / other[key] for key in common], level)
    if not one or not other:
        return None
    return Estimate(median_time(one.values()) / median_time(other.values()), None, None, 0)


def paired_difference(
    one: Mapping[Any, float], other: Mapping[Any, float], level: float = LEVEL, *, shared_variance: float = 0.0
) -> Estimate | None:
    """`one`'s figure less `other`'s, from the repeats that both have.

    `shared_variance` is that of an error which all repeats have in common, so that repeating does not make it smaller.
    """
    return of_levels([one[key] - other[key] for key in one if key in other], level, shared_variance)


def _estimate(
    values: Sequence[float],
    level: float,
    into: Callable[[float], float],
    back: Callable[[float], float],
    shared_variance: float = 0.0,
) -> Estimate | None:
    if not values:
        return None
    median = _median(values, into, back)
    if len(values) == 1:
        return Estimate(median, None, None, 1)
    scaled = [into(value) for value in values]
    centre = statistics.fmean(scaled)
    variance = statistics.variance(scaled) / len(scaled)
    freedom = _freedom(variance, shared_variance, len(scaled) - 1)
    half = student_t_quantile((1 + level) / 2, freedom) * math.sqrt(variance + shared_variance)
    # The centre is a mean, the value a median: among outliers the interval is stretched to hold the value it is about.
    return Estimate(median, min(back(centre - half), median), max(back(centre + half), median), len(values))


def _median(values: Sequence[float], into: Callable[[float], float], back: Callable[[float], float]) -> float:
    low, high = statistics.median_low(values), statistics.median_high(values)
    return float(low if low == high else back((into(low) + into(high)) / 2))


def _freedom(variance: float, known: float, freedom: int) -> int:
    """The degrees of freedom of an estimated variance plus a known one, by Welch and Satterthwaite, rounded down."""
    if not known:
        return freedom
    if variance < known * 1e-6:
        return MOST_FREEDOM
    return min(MOST_FREEDOM, int(freedom * (1 + known / variance) ** 2))


def student_t_quantile(probability: float, freedom: int) -> float:
    """The value that Student's t with whole degrees of freedom stays below with a probability of a half or more.

    Measuring decides by it when to stop, and measuring must run where scipy is not: hence by hand, from the finite sums
    of Abramowitz and Stegun, 26.7.3 and 26.7.4, solved by bisection.
    """
    low, high = 0.0, 1.0
    while _student_t_below(high, freedom) < probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_t_below(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _student_t_below(t: float, freedom: int) -> float:
    """The probability that Student's t is below `t` ≥ 0."""
    angle = math.atan2(t, math.sqrt(freedom))
    odd = freedom % 2
    total = term = math.cos(angle) if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= (k - 1) / k * math.cos(angle) ** 2
        total += term
    if odd:
        inside = 2 / math.pi * (angle + (math.sin(angle) * total if freedom > 1 else 0.0))
    else:
        inside = math.sin(angle) * total
    return (1 + inside) / 2
