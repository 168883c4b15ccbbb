"""Headline of a comparison: the fastest that computes the same as one process; beside it, faster ones that do not."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.analysis.comparison import Alternative, CandidateRow, Comparison
from paceline.analysis.exclusions import Exclusion
from paceline.formatting import FACTOR, factor, interval, plural, seconds
from paceline.report.verdict.accuracy import learning_clause, price
from paceline.report.verdict.phrases import MORE_REPEATS, communication_cost, few_repeats, interval_and_repeats

REMARKS: dict[Exclusion, str] = {
    "asynchronous": "asynchronous",
    "lossy": "lossy",
    "replicas_differ": "replicas differ",
    "diverged": "diverged",
}
"""Reasons why a candidate cannot be recommended, as a remark after its name."""
WHY_NOT_THE_SAME: dict[Exclusion | None, str] = {
    "asynchronous": "ranks do not wait for each other, so gradients are stale",
    "lossy": "it does not train with the mean gradient",
}


def remark_on(row: CandidateRow) -> str:
    """Return why a candidate cannot be recommended, as a remark; empty if it can, or if its name already says it."""
    remark = "" if row.exclusion is None else REMARKS[row.exclusion]
    return "" if remark in row.candidate.name else remark


def headline(comparison: Comparison) -> Iterator[str]:
    """Yield what to pick, as far as that is certain, then the faster candidates that do not compute the same."""
    yield from _one_process_advice(comparison)
    if comparison.pick is None or comparison.computes_same:
        yield from _winner(comparison)
    yield from (alternative_sentence(comparison, alternative) for alternative in comparison.alternatives)


def _one_process_advice(comparison: Comparison) -> Iterator[str]:
    """Yield the advice to train in one process, where that is faster than every strategy that computes the same."""
    baseline = comparison.over_one_process()
    if baseline is None or comparison.pick != baseline[0].candidate.name:
        return
    row, gain = baseline
    assert comparison.decision.first is not None
    assert row.step_s is not None
    time = f"{seconds(row.step_s.value)} per step"
    if not comparison.computes_same:
        yield f"Train in one process: {time}; no distributed candidate computes the same."
        return
    best = comparison.row(comparison.decision.first)
    cost = communication_cost(best, f"{best.candidate.name}'s")
    because = "" if cost is None else f"; {cost}"
    yield (
        f"Train in one process: {time}, {factor(1 / gain.value)} as fast as {comparison.decision.first} on "
        f"{plural(best.workers or 1, 'rank')}{because}."
    )


def _winner(comparison: Comparison) -> Iterator[str]:
    """Yield which distributed strategy is fastest, as far as that is certain."""
    decision = comparison.decision
    if decision.first is None:
        yield _nothing_to_pick(comparison)
        return
    if not comparison.computes_same:
        yield f"No candidate computes the same as one process: {_fastest_of_others(comparison)}."
        return
    first = comparison.row(decision.first)
    assert first.step_s is not None
    same = " that computes the same" if _has_excluded(comparison) else ""
    if decision.second is None:
        yield f"{decision.first} takes {seconds(first.step_s.value)} per step; {_why_alone(comparison)}."
        return
    assert decision.ratio is not None
    assert decision.level is not None
    ratio, repeats = decision.ratio, plural(decision.ratio.repeats, "repeat")
    certainty = interval_and_repeats(ratio, decision.level)
    learning = comparison.better_learned
    if decision.outcome == "winner" and learning is not None:
        yield (
            f"{decision.first} is the fastest: {seconds(first.step_s.value)} per step, {factor(ratio.value)} as fast "
            f"as {decision.second}, the next best{same}{certainty}. But {learning_clause(comparison, learning)}."
        )
    elif decision.outcome == "winner":
        beats_one = comparison.pick == decision.first and not comparison.gain_in_doubt
        pick = "Pick" if beats_one else "Of the distributed strategies, pick"
        yield (
            f"{pick} {decision.first}: {seconds(first.step_s.value)} per step, {factor(ratio.value)} as fast as "
            f"{decision.second}, the next best{same}{certainty}."
        )
    elif decision.outcome == "equal":
        yield (
            f"{decision.first} and {decision.second} are equally fast: {seconds(first.step_s.value)} per step, "
            f"a ratio of {factor(ratio.value)}{certainty}."
        )
    elif ratio.repeats == 0:
        yield (
            f"{decision.first} was {factor(ratio.value)} as fast as {decision.second}, but they were measured in "
            "separate experiments, so the machine may have caused the difference. Compare them in one experiment."
        )
    elif ratio.low is None:
        yield f"{few_repeats(decision.first, decision.second, ratio)}."
        yield MORE_REPEATS
    else:
        yield (
            f"No clear winner: {decision.second} takes {factor(ratio.value)} the time of {decision.first}, but the "
            f"interval ({interval(ratio.low, ratio.high, FACTOR)}, {repeats}) includes equal speed (differences below "
            "1% count as none). More repeats or longer runs may decide it."
        )


def _nothing_to_pick(comparison: Comparison) -> str:
    """Return why no candidate can be recommended."""
    if any(row.diverged or row.is_stopped_by_divergence for row in comparison.rows):
        return "All candidates have diverged or failed, so there is none to pick."
    return "No candidate was timed, so there is none to pick."


def _why_alone(comparison: Comparison) -> str:
    """Return why the fastest candidate is compared with no other distributed one, as a clause."""
    others = [row for row in comparison.rows if row.candidate.role == "candidate"]
    if any(row.is_stopped_by_divergence or row.exclusion == "diverged" for row in others):
        return "it is the only candidate that has not diverged"
    if _has_excluded(comparison):
        return "no other distributed candidate computes the same"
    return "no other distributed candidate was measured"


def _has_excluded(comparison: Comparison) -> bool:
    return any(row.exclusion is not None for row in comparison.with_role("candidate"))


def _fastest_of_others(comparison: Comparison) -> str:
    """Return the speed of the fastest candidate where none computes the same, as a clause without a recommendation."""
    decision = comparison.decision
    assert decision.first is not None
    first = comparison.row(decision.first)
    assert first.step_s is not None
    assert first.exclusion is not None
    time = f"{decision.first} ({REMARKS[first.exclusion]}) takes {seconds(first.step_s.value)} per step"
    if decision.second is None or decision.ratio is None or decision.level is None:
        return time
    certainty = interval_and_repeats(decision.ratio, decision.level)
    return f"{time}, {decision.second} {factor(decision.ratio.value)} that time{certainty}"


def alternative_sentence(comparison: Comparison, alternative: Alternative) -> str:
    """Return a faster candidate that does not compute the same, with its price in accuracy."""
    gain, best = alternative.speed_up, alternative.instead_of
    name, speed = alternative.row.candidate.name, f"{factor(gain.value)} as fast as {best}"
    why = f"does not compute the same: {WHY_NOT_THE_SAME[alternative.row.exclusion]}"
    certainty = interval_and_repeats(gain, alternative.level)
    if gain.low is None:
        faster = f"{few_repeats(name, best, gain)}; it {why}."
    elif gain.spans(1):
        faster = f"{name} shows no measurable gain in speed, {speed}{certainty}, and {why}."
    else:
        faster = f"{name} is {speed}{certainty}, but {why}."
    return f"{faster} {price(comparison, alternative)}"
