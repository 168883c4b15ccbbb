"""Clauses that several sentences of a verdict share: what communication costs, and intervals in brackets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.analysis.statistics import MIN_REPEATS, Estimate
from paceline.formatting import FACTOR, Unit, confidence, factor, factors_of_repeats, interval, percent, plural

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


def pairing(difference: Estimate, medians: Sequence[float], shown: Unit) -> str:
    """Return a clause on a difference paired by seed that is not that of the two medians in the table; else nothing.

    A difference in the last decimal is one of rounding.
    """
    one, other = (round(median / shown.scale, shown.decimals) for median in medians)
    of_medians = abs(one - other)
    if round(abs(abs(difference.value) / shown.scale - of_medians), shown.decimals) <= 10**-shown.decimals:
        return ""
    return f", paired by seed; the medians differ by {shown.write(of_medians * shown.scale)}"


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


def without_intervals(comparison: Comparison) -> Iterator[str]:
    """Yield a warning where points of an experiment have too few repeats for an interval."""
    repeats = {row.repeats for row in comparison.rows if row.is_measured}
    few = sorted(count for count in repeats if 0 < count < MIN_REPEATS)
    if few and few == sorted(repeats):
        counts = {1: "One repeat gives", 2: "Two repeats give"}[few[-1]]
        each = "; both values are shown" if few[-1] == 2 else ""
        yield (f"{counts} no interval{each}, so no difference here is certain. Use --repeats {MIN_REPEATS} or more.")
    elif few:
        yield (f"Points with fewer than {MIN_REPEATS} repeats have no interval, so their differences are not certain.")


def spans_one(ratio: Estimate) -> bool:
    """Return whether the interval contains 1, or two repeats contradict each other.

    False for one repeat, about which there is one warning for all.
    """
    if ratio.low is None:
        return ratio.repeats > 1 and ratio.repeats_contradict(1)
    return ratio.spans(1)


def format_ratio(ratio: Estimate) -> str:
    """Format a ratio with its interval, or with what two repeats showed.

    Where the interval is too wide to be useful, the number of repeats replaces it.
    """
    if ratio.low is None or ratio.high is None:
        value, each = factor(ratio.value), factors_of_repeats(ratio.each)
        return value if ratio.repeats < 2 else f"{value} ({'both repeats' if each == value else each})"
    too_wide = ratio.is_vague and ratio.spans(1)
    ends = f"n = {ratio.repeats}" if too_wide else interval(ratio.low, ratio.high, FACTOR)
    return f"{factor(ratio.value)} ({ends})"
