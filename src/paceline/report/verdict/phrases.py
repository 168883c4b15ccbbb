"""Clauses that several sentences of a verdict share: what communication costs, and intervals in brackets."""

from __future__ import annotations

from paceline.analysis.comparison import CandidateRow
from paceline.analysis.statistics import Estimate
from paceline.formatting import FACTOR, confidence, interval, percent, plural


def communication_cost(row: CandidateRow, whose: str) -> str | None:
    """Return the share of a step lost to communication, as a clause; None where it is zero or unknown.

    Exposed communication was observed directly. The difference to the bound can be larger, since communication also
    takes cores from computing, or smaller, since the ranks of a bound never wait for each other.
    """
    if row.exposed is not None:
        share = row.exposed.value
        return f"{percent(share, 0)} of {whose} step is exposed communication" if share > 0 else None
    if row.above_bound is not None and row.above_bound.value > 0:
        return without_exchange(row.above_bound.value, whose)
    return None


def without_exchange(share: float, whose: str) -> str:
    """Return the share of a step that is saved when nothing is exchanged, as a clause."""
    return f"{whose} step would be {percent(share, 0)} shorter if nothing were exchanged"


def in_brackets(estimate: Estimate) -> str:
    """Return the interval of a ratio in brackets, after a space; empty without an interval."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f" ({interval(estimate.low, estimate.high, FACTOR)})"


def interval_and_repeats(estimate: Estimate, level: float) -> str:
    """Return the interval of a ratio, its level and the number of repeats in brackets, after a space."""
    repeats = plural(estimate.repeats, "repeat")
    if estimate.low is None or estimate.high is None:
        return f" ({repeats})"
    return f" ({confidence(level)} interval {interval(estimate.low, estimate.high, FACTOR)}, {repeats})"
