"""What measuring costs: figures with it over figures without it, pair by pair."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.analysis.statistics import LEVEL, Estimate, median_time


def extra_share(with_it: Sequence[float], without: Sequence[float]) -> Estimate | None:
    """By what share figures grew: the median over pairs, with its interval; None of no pair.

    The two of a pair were taken right after each other, so that the machine's mood is in both. What disturbs only one
    of them makes an outlier, so the interval is that of a median, from the order of the pairs alone.
    """
    ratios = sorted(one / other for one, other in zip(with_it, without, strict=True))
    if not ratios:
        return None
    outside = _outside(len(ratios))
    low, high = (None, None) if outside is None else (ratios[outside] - 1, ratios[-1 - outside] - 1)
    return Estimate(median_time(ratios) - 1, low, high, len(ratios))


def _outside(count: int) -> int | None:
    """How many of so many figures, on each side, are outside the interval of their median; None of too few.

    Each is below the true median with a probability of a half, so how many are is binomial.
    """
    probability, outside = 0.0, -1
    while True:
        probability += math.comb(count, outside + 1) / 2**count
        if probability > (1 - LEVEL) / 2:
            return outside if outside >= 0 else None
        outside += 1
