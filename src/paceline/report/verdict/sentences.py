"""Sentences of a verdict, each with the figures that support it; the first one is the headline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.analysis.ranks import RankRow
from paceline.analysis.traffic.payload import Payload, RankBytes
from paceline.formatting import factor, join_names, plural, size
from paceline.report.verdict.accuracy import accuracy_sentences
from paceline.report.verdict.headline import headline
from paceline.report.verdict.phrases import communication_cost, few_repeats, in_brackets, without_exchange

NOTABLE_IMBALANCE = 1.5
"""Ratio of a rank's bytes to those of the next busiest rank from which the imbalance gets a sentence."""


def sentences(comparison: Comparison) -> list[str]:
    """Return the verdict: what to pick, its gain over one process, what limits it, and other notable results."""
    found = [*headline(comparison), *_gain_over_one_process(comparison)]
    found += [*_imbalance(comparison), *accuracy_sentences(comparison)]
    if comparison.interrupted:
        found.append("This comparison was interrupted: it covers only the runs that had finished by then.")
    return found


def _gain_over_one_process(comparison: Comparison) -> Iterator[str]:
    """Yield the gain of the best candidate over one process, and what its communication costs."""
    if comparison.decision.first is None or not comparison.computes_same:
        return
    best, baseline = comparison.row(comparison.decision.first), comparison.over_one_process()
    cost = communication_cost(best, "its")
    if baseline is not None:
        gain = baseline[1]
        ranks = f"{best.candidate.name} on {plural(best.workers or 1, 'rank')}"
        because = f"; {cost}." if cost else "."
        if comparison.gain_in_doubt:
            yield (
                f"The speed-up of {ranks} over one process is not known: {factor(gain.value)}{in_brackets(gain)}, "
                f"measured while other programs used the cores, is more than {plural(best.workers or 1, 'rank')} can "
                f"gain{because}"
            )
        elif gain.low is None:
            yield f"{few_repeats(ranks, 'one process', gain)}{because}"
        elif gain.spans(1):
            ratio = f"{factor(gain.value)} as fast{in_brackets(gain)}"
            yield f"{ranks} shows no measurable difference in speed from one process: {ratio}{because}"
        elif gain.value > 1 or comparison.better_learned is not None:  # Otherwise the headline advises one process.
            yield f"{ranks} is {factor(gain.value)} as fast as one process{in_brackets(gain)}{because}"
    elif best.above_bound is not None and best.above_bound.value > 0:
        most = without_exchange(best.above_bound.value, "its")
        yield f"{best.candidate.name}: {most}; no other strategy can gain more than that."
    elif cost:
        yield f"{best.candidate.name}: {cost}."


def _imbalance(comparison: Comparison) -> Iterator[str]:
    """Yield ranks that carry much more traffic than others, and the slowest candidate."""
    candidates = comparison.with_role("candidate")
    for imbalance, names in _imbalances(candidates, comparison.payloads).items():
        yield f"{join_names(names)}: {imbalance}."
    if len(candidates) < 3 or comparison.decision.first is None:
        return
    best, last = comparison.decision.first, candidates[-1]
    times = comparison.speed_up(best, last.candidate.name)
    if times is not None and times.low is not None and times.low > 1:
        sent = last.busiest_sent_bytes
        sends = "" if not sent else f"; its busiest rank sends {size(sent)} per step"
        ratio = f"{factor(times.value)} the time of {best}{in_brackets(times)}"
        yield f"{last.candidate.name} is the slowest: {ratio}{sends}."


def _imbalances(rows: Sequence[CandidateRow], payloads: Mapping[str, Payload]) -> dict[str, list[str]]:
    """Return a clause for each rank that moves notably more bytes than any other, with the candidates it applies to.

    Bytes are those the kernel counted, where it did, else those of the plan.
    """
    found: dict[str, list[str]] = {}
    for row in rows:
        payload = payloads.get(row.candidate.name)
        ranks: Sequence[RankRow | RankBytes] = row.ranks if payload is None else payload.ranks
        moved = sorted(((r.sent_bytes or 0) + (r.received_bytes or 0), r.rank) for r in ranks)
        if len(moved) > 1 and moved[-2][0] and moved[-1][0] >= NOTABLE_IMBALANCE * moved[-2][0]:
            (next_most, _), (most, rank) = moved[-2:]
            counted = "" if payload is None else f" ({size(most)} per step, measured at its sockets)"
            clause = f"rank {rank} sends and receives {factor(most / next_most)} the bytes of any other rank{counted}"
            found.setdefault(clause, []).append(row.candidate.name)
    return found
