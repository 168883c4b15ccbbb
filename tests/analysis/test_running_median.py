"""Median of a stream: exact while all values fit, close to the middle of all values after that."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from paceline.analysis.running_median import RunningMedian


def median_of(values: np.ndarray, capacity: int, parts: int = 1) -> float | None:
    median = RunningMedian(capacity)
    for part in np.array_split(values, parts):
        median.add(part)
    return median.value


def test_without_values_there_is_none() -> None:
    assert RunningMedian().value is None


@pytest.mark.parametrize("count", [1, 2, 99, 100])
def test_as_many_values_as_fit_have_their_exact_median(count: int) -> None:
    values = np.random.default_rng(1).exponential(size=count)
    assert median_of(values, capacity=100) == np.median(values)
    one_by_one = RunningMedian(100)
    for value in values.tolist():
        one_by_one.add(value)
    assert one_by_one.value == np.median(values)


@pytest.mark.parametrize("parts", [1, 7, 5000])
def test_of_more_values_the_median_is_close_to_the_middle(parts: int) -> None:
    values = np.arange(100_000.0)
    found = median_of(values, capacity=10_000, parts=parts)
    assert found == pytest.approx(50_000, rel=0.04), "8 standard errors of a sample of 10,000"
    assert median_of(values[::-1], capacity=10_000, parts=parts) == pytest.approx(50_000, rel=0.04)


def test_values_of_all_times_are_kept_alike() -> None:
    """Two of five values are slow, in a regular pattern: a regular selection of values could keep these alone."""
    values = np.tile([9.0, 1.0, 1.0, 1.0, 9.0], 20_000)
    assert median_of(values, capacity=1000, parts=100) == 1.0
    late = np.concatenate([np.full(60_000, 1.0), np.full(40_000, 9.0)])
    assert median_of(late, capacity=1000, parts=100) == 1.0
    early = np.concatenate([np.full(40_000, 9.0), np.full(60_000, 1.0)])
    assert median_of(early, capacity=1000, parts=100) == 1.0


def test_the_same_values_have_the_same_median() -> None:
    values = np.random.default_rng(2).normal(size=5000)
    assert median_of(values, capacity=100, parts=50) == median_of(values, capacity=100, parts=50)
    assert median_of(values, capacity=100, parts=50) == median_of(values, capacity=100, parts=3)


def test_memory_does_not_grow_beyond_the_capacity() -> None:
    median, sizes = RunningMedian(1000), []
    for _ in range(3):
        median.add(np.arange(2000.0))
        sizes.append(len(pickle.dumps(median)))
    assert max(sizes) - min(sizes) < 100
    assert max(sizes) < 2 * 8 * 1000
