"""Score of a race, as MLPerf Training computes it: without the fastest and the slowest run, the mean of the others."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_RUNS = 3
"""Runs from which the fastest and the slowest are left out of the score; of fewer, none is."""


def score(times: Sequence[float | None]) -> float | None:
    """Return the score of runs by their times, None for a run that missed the target.

    A miss counts as the slowest run. There is no score with more misses than runs are left out as slowest: two or more,
    or one of fewer than three runs.
    """
    reached = sorted(time for time in times if time is not None)
    misses = len(times) - len(reached)
    if not times or misses > allowed_misses(len(times)):
        return None
    kept = reached[1:] if len(times) >= LEAST_RUNS else reached
    if len(times) >= LEAST_RUNS and not misses:
        kept = kept[:-1]
    return sum(kept) / len(kept)


def allowed_misses(runs: int) -> int:
    """Return the number of misses with which runs still have a score."""
    return 1 if runs >= LEAST_RUNS else 0
