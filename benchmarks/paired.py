"""Paired comparison: each round gives every candidate a figure; ratios within a round leave the machine's mood out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Ratio:
    """A candidate's figures over another's: the median over rounds, with its 95% confidence interval."""

    median: float
    low: float
    high: float
    rounds: int

    def within(self, limit: float) -> bool | None:
        """Whether the ratio is at most `limit`; None where the interval leaves it open."""
        if self.high <= limit:
            return True
        return False if self.low > limit else None

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.median:.3f}"
        return f"{self.median:.3f} ({self.low:.3f}–{self.high:.3f})"


def ratio(figures: list[float], to: list[float]) -> Ratio:
    """The ratio of two lists of figures, round by round; the interval is of order statistics, free of assumptions."""
    ratios = np.array(figures) / np.array(to)
    low, high = stats.quantile_test(ratios, q=1, p=0.5).confidence_interval(0.95)  # nan below six rounds
    return Ratio(float(np.median(ratios)), float(low), float(high), len(ratios))
