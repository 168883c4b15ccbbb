"""Median of values that arrive over time, in constant memory."""

from __future__ import annotations

from array import array
from functools import cached_property

import numpy as np
import numpy.typing as npt

CAPACITY = 2**16
"""Values that are kept: 0.5 MB. Steps of 10 ms reach it after 11 minutes, windows of half a second after 9 hours."""


class RunningMedian:
    """Median of all values added so far: exact for up to `capacity` values.

    Of more values a uniform random sample of that size is kept (Vitter's algorithm R). Its median is a value whose rank
    among all values differs from the middle by 0.2% (standard error, at 65,536 kept values). A regular selection, such
    as every tenth value, could miss all slow steps of a strategy that communicates periodically. The random numbers
    are always the same ones, so the same values have the same median.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._kept = array("d")
        self._count = 0

    def add(self, values: npt.ArrayLike) -> None:
        """Add values."""
        new = np.asarray(values, dtype=np.float64).reshape(-1)
        fitting = new[: self._capacity - len(self._kept)]
        self._kept.frombytes(fitting.tobytes())
        self._count += len(fitting)
        if len(fitting) < len(new):
            self._replace_some(new[len(fitting) :])

    @property
    def value(self) -> float | None:
        """Median of the values; None without any."""
        return float(np.median(np.frombuffer(self._kept))) if self._kept else None

    def _replace_some(self, new: npt.NDArray[np.float64]) -> None:
        """Let value number n take the place of a kept one with probability capacity ÷ n."""
        numbers = np.arange(self._count + 1, self._count + len(new) + 1)
        places = self._random.integers(0, numbers)
        kept = places < self._capacity
        np.frombuffer(self._kept)[places[kept]] = new[kept]
        self._count += len(new)

    @cached_property
    def _random(self) -> np.random.Generator:
        return np.random.default_rng(0)
