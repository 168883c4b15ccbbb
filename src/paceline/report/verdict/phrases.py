"""Clauses that several sentences of a verdict share: what communication costs, and intervals in brackets."""

from __future__ import annotations

from paceline.analysis.comparison import CandidateRow
from paceline.analysis.statistics import MIN_REPEATS, Estimate
from paceline.formatting import FACTOR, confidence, factors_of_repeats, interval, percent, plural

MORE_REPEATS = f"An interval needs {MIN_REPEATS} repeats: --repeats {MIN_REPEATS} may decide it."


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


def few_repeats(name: str, other: str, speed_up: Estimate) -> str:
    """Return what one or two repeats showed of the speed of one candidate, which have no interval."""
    ratios = f"{factors_of_repeats(speed_up.each)} as fast"
    if speed_up.repeats < 2:
        return f"{name} was {ratios} as {other} in one repeat, a single measurement"
    if speed_up.repeats_contradict(1):
        return f"{name} was {ratios} as {other} in two repeats, which contradict each other"
    direction = "faster" if speed_up.value > 1 else "slower"
    return f"{name} was {direction} than {other} in both repeats: {ratios}"


def in_brackets(estimate: Estimate) -> str:
    """Return the interval of a ratio in brackets, after a space; the value of each repeat if there is no interval."""
    if estimate.each:
        return f" ({factors_of_repeats(estimate.each)} in {plural(estimate.repeats, 'repeat')})"
    if estimate.low is None or estimate.high is None:
        return ""
    return f" ({interval(estimate.low, estimate.high, FACTOR)})"


def interval_and_repeats(estimate: Estimate, level: float) -> str:
    """Return the interval of a ratio, its level and the number of repeats in brackets, after a space."""
    repeats = plural(estimate.repeats, "repeat")
    if estimate.each:
        return in_brackets(estimate)
    if estimate.low is None or estimate.high is None:
        return f" ({repeats})"
    return f" ({confidence(level)} interval {interval(estimate.low, estimate.high, FACTOR)}, {repeats})"
