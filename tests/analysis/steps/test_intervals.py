"""Interval arithmetic, compared with sets of points."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.analysis.steps.intervals import Interval, clipped, difference, intersection, length, union

LAST = 12
intervals = st.lists(st.tuples(st.integers(0, LAST), st.integers(0, LAST)).map(lambda pair: (min(pair), max(pair))))


def points(found: list[Interval]) -> set[int]:
    """Return the unit intervals that are covered, by their starts; ends are integers here."""
    return {point for start, end in found for point in range(int(start), int(end))}


def is_disjoint_and_in_order(found: list[Interval]) -> bool:
    return all(start < end for start, end in found) and all(a[1] <= b[0] for a, b in pairwise(found))


@given(intervals)
def test_union(some: list[Interval]) -> None:
    found = union(some)
    assert points(found) == points(some)
    assert is_disjoint_and_in_order(found)
    assert all(a[1] < b[0] for a, b in pairwise(found)), "touching intervals are merged"
    assert length(found) == len(points(some))


@given(intervals, intervals)
def test_intersection(some: list[Interval], others: list[Interval]) -> None:
    found = intersection(union(some), union(others))
    assert points(found) == points(some) & points(others)
    assert is_disjoint_and_in_order(found)


@given(intervals, intervals)
def test_difference(some: list[Interval], others: list[Interval]) -> None:
    found = difference(union(some), union(others))
    assert points(found) == points(some) - points(others)
    assert is_disjoint_and_in_order(found)


@given(intervals, st.integers(0, LAST), st.integers(0, LAST))
def test_clipped(some: list[Interval], one: int, other: int) -> None:
    start, end = min(one, other), max(one, other)
    assert points(clipped(some, start, end)) == points(some) & points([(start, end)])


@given(intervals, intervals)
def test_lengths_add_up(some: list[Interval], others: list[Interval]) -> None:
    one, other = union(some), union(others)
    assert length(intersection(one, other)) + length(difference(one, other)) == length(one)
    assert length(union([*one, *other])) == length(one) + length(other) - length(intersection(one, other))


def test_by_hand() -> None:
    assert union([(3, 5), (1, 2), (2, 2.5), (4, 4.5), (7, 7)]) == [(1, 2.5), (3, 5)]
    assert difference([(0, 10)], [(2, 3), (5, 12)]) == [(0, 2), (3, 5)]
    assert intersection([(0, 4), (6, 9)], [(3, 7)]) == [(3, 4), (6, 7)]
    assert clipped([(0, 4), (6, 9)], 3, 6) == [(3, 4)]
    assert length([]) == 0
    assert length([(0.5, 1.0), (2.0, 2.25)]) == pytest.approx(0.75)
