"""Interval arithmetic: union, intersection, difference, length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
"""Start and end, with start ≤ end."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union as disjoint intervals in order; empty intervals are omitted."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def length(disjoint: Iterable[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - start for start, end in disjoint)


def intersection(ones: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two lists of disjoint intervals in order."""
    found: list[Interval] = []
    i = j = 0
    while i < len(ones) and j < len(others):
        start, end = max(ones[i][0], others[j][0]), min(ones[i][1], others[j][1])
        if end > start:
            found.append((start, end))
        if ones[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(ones: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the first list without the second; both are disjoint and in order."""
    found: list[Interval] = []
    j = 0
    for start, end in ones:
        while j < len(others) and others[j][1] <= start:
            j += 1
        k = j
        while k < len(others) and others[k][0] < end:
            if others[k][0] > start:
                found.append((start, others[k][0]))
            start = max(start, others[k][1])
            k += 1
        if end > start:
            found.append((start, end))
    return found


def clipped(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """Return the parts of intervals between `start` and `end`."""
    return [(max(a, start), min(b, end)) for a, b in intervals if a < end and b > start]
