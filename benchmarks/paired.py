"""Paired comparison: ratios of times of the same round, so that a slow phase of the machine affects both. Results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy import stats

from paceline.records import provenance


@dataclass(frozen=True)
class Ratio:
    """Ratio of two candidates' times: the median over rounds, with its 95% confidence interval."""

    median: float
    low: float
    high: float
    rounds: int

    def within(self, limit: float) -> bool | None:
        """Return whether the ratio is at most `limit`; None if the interval contains the limit."""
        if self.high <= limit:
            return True
        return False if self.low > limit else None

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.median:.3f}"
        return f"{self.median:.3f} ({self.low:.3f}–{self.high:.3f})"


def ratio(figures: list[float], to: list[float]) -> Ratio:
    """Return the ratio of two lists of times, paired by round. The interval uses order statistics, so it assumes no
    distribution.
    """
    ratios = np.array(figures) / np.array(to)
    low, high = stats.quantile_test(ratios, q=1, p=0.5).confidence_interval(0.95)  # NaN for fewer than six rounds.
    return Ratio(float(np.median(ratios)), float(low), float(high), len(ratios))


def write_results(file: Path, results: Mapping[str, Any]) -> None:
    """Write results as JSON, with the machine, the versions and the command that they come from."""
    content = msgspec.json.encode({"provenance": provenance(), **results})
    file.write_bytes(msgspec.json.format(content, indent=2) + b"\n")
