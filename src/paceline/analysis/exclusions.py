"""Candidates that cannot be recommended, although they are measured: those that do not compute the same as one process.

A strategy computes the same if it trains with the mean gradient of the global batch (lossless) and all ranks step
together (lockstep). A fast strategy that does not is an alternative, with a price in accuracy. A candidate whose
training went wrong is neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from paceline.analysis.divergence import divergence_of
from paceline.analysis.record_set import RecordSet
from paceline.records import Summary
from paceline.records.experiment.design import Candidate

Exclusion = Literal["asynchronous", "lossy", "replicas_differ", "diverged"]
"""Reason: ranks do not step together; the gradient is not the mean gradient; replicas that should be equal differ; it
diverged in a repeat in which another candidate did not, also if it is asynchronous or lossy: its price in accuracy
would be that of the repeats in which it did not diverge."""
ALTERNATIVES: tuple[Exclusion, ...] = ("asynchronous", "lossy")
"""Reasons that are by design: the candidate trained as it should, but computes something else than one process."""

DRIFT = 1e-6
"""Largest relative difference between ranks' weights after a run under a lossless strategy. Ranks that apply the same
update end with identical bits, as under all built-in strategies; the tolerance allows for a strategy in which ranks add
the same numbers in different orders."""


def exclusions(record_set: RecordSet) -> dict[str, Exclusion]:
    """Return the candidates that cannot be recommended, with the reason; bounds and baselines are left out."""
    candidates = [candidate for candidate in record_set.candidates if candidate.role == "candidate"]
    found = {c.name: reason for c in candidates if (reason := _own_exclusion(record_set, c)) is not None}
    exact = [c.name for c in record_set.candidates if c.role != "bound" and c.name not in found]
    alternatives = [name for name, reason in found.items() if reason in ALTERNATIVES]
    diverged = _diverged_alone(record_set, [*exact, *alternatives], beside=exact or alternatives)
    return found | {c.name: "diverged" for c in candidates if c.name in diverged}


def _own_exclusion(record_set: RecordSet, candidate: Candidate) -> Exclusion | None:
    """Return the reason that a candidate has without regard to others."""
    runs = record_set.runs_of(candidate.name).values()
    if not all(run.lockstep for run in runs):
        return "asynchronous"
    if not candidate.lossless:
        return "lossy"
    return "replicas_differ" if any(_has_drifted(run.summary) for run in runs if run.summary) else None


def largest_drift(summaries: Iterable[Summary]) -> float:
    """Return the largest relative difference between ranks' weights at the end of the runs."""
    return max([summary.weight_divergence or 0.0 for summary in summaries], default=0.0)


def _has_drifted(summary: Summary) -> bool:
    difference = summary.replicas.difference if summary.replicas else None
    return largest_drift([summary]) > DRIFT or (difference is not None and not difference.by_rounding)


def diverged(record_set: RecordSet, candidate: str) -> set[tuple[int, int]]:
    """Return the repeats in which a candidate has diverged."""
    runs = record_set.runs_of(candidate).items()
    return {repeat for repeat, run in runs if divergence_of(run) is not None}


def _diverged_alone(record_set: RecordSet, names: list[str], beside: list[str]) -> set[str]:
    """Return those of `names` that diverged in a repeat in which one of `beside` did not.

    Where all diverge, the settings are the reason, and no candidate is worse than another.
    """
    lost = {name: diverged(record_set, name) for name in names}
    kept = {repeat for name in beside for repeat in record_set.runs_of(name) if repeat not in lost[name]}
    return {name for name in names if lost[name] & kept}
