"""What measuring costs: figures with it over figures without it, pair by pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.analysis.statistics import Estimate, of_times


def extra_share(with_it: Sequence[float], without: Sequence[float]) -> Estimate | None:
    """By what share figures grew: the median over pairs, with its interval; None of no pair.

    The two of a pair were taken right after each other, so that the machine's mood is in both.
    """
    estimate = of_times([one / other for one, other in zip(with_it, without, strict=True)])
    if estimate is None:
        return None
    low, high = (None if bound is None else bound - 1 for bound in (estimate.low, estimate.high))
    return replace(estimate, value=estimate.value - 1, low=low, high=high)
