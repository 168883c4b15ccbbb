"""Sentences on replicas that differ, for the error that stops a run, the terminal and the page."""

from __future__ import annotations

from paceline.formatting import join_names, plural, scientific
from paceline.records.summary import ReplicaDifference


def difference_sentence(difference: ReplicaDifference) -> str:
    """Return a sentence, without a full stop, on which tensors differ, on which ranks, how much and since when."""
    where = _where(difference)
    if difference.by_rounding:
        return (
            f"replicas differ by rounding, found after step {difference.step}: {_what(difference)}, by up to "
            f"{_distance(difference)} {where}; other processors or another order of summation explain it"
        )
    last = difference.last_equal_step
    since = "no earlier check found them equal" if last is None else f"they were equal after step {last}"
    if last == difference.step:
        since = "they were equal at the end of that step, so the weights were changed after it"
    return (
        f"replicas differ after step {difference.step}: {_what(difference)}, by up to {_distance(difference)} {where}; "
        f"{since}"
    )


def _what(difference: ReplicaDifference) -> str:
    others = difference.tensors - 1
    return difference.tensor + (f" and {plural(others, 'other tensor')}" if others else "")


def _where(difference: ReplicaDifference) -> str:
    ranks = difference.ranks
    return f"({'rank' if len(ranks) == 1 else 'ranks'} {join_names([str(rank) for rank in ranks])})"


def _distance(difference: ReplicaDifference) -> str:
    distance = difference.distance
    return "a value that is not finite" if distance is None else f"{scientific(distance)} of the norm"
