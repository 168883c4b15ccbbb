"""What a reader has to know before believing a comparison: other machines or moments, ranks that drift apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from paceline.analysis.curves import loss_curve
from paceline.analysis.record_set import RecordSet
from paceline.analysis.traffic.payload import payload_of
from paceline.config.slow_ranks import format_slow_ranks, parse_slow_ranks
from paceline.records import RunRecord

DRIFT = 1e-6
"""How far apart, relative to their norm, the ranks' weights may be after a run that promises the same gradient on all.
Ranks that apply the same update end with the same bits, as with all our strategies; this leaves room for one in which
each rank adds the same numbers up in an order of its own."""


def caveats(record_set: RecordSet, uneven: Mapping[str, float | None], *, crowding: bool = True) -> Iterator[str]:
    """The sentences to show above the table; `uneven` says by how much a candidate's ranks differ, best first.

    Without `crowding` nothing is said of ranks that share cores: who asks so has more to say of it.
    """
    machines = {(p.get("host"), p.get("cpu")) for p in record_set.provenances}
    if len(machines) > 1:
        names = ", ".join(sorted(f"{host} ({cpu})" for host, cpu in machines))
        yield f"These records come from different machines: {names}. Their times cannot be compared."
    versions = {str(p.get("versions", {}).get("torch")) for p in record_set.provenances}
    if len(versions) > 1:
        yield f"These records come from different versions of torch: {', '.join(sorted(versions))}."
    if len(record_set.designs) > 1 or (not record_set.designs and len(record_set.entries) > 1):
        yield "These runs were not measured interleaved, so a busy moment of the machine may look like a difference."
    over = next((entry.run.topology for entry in record_set.entries if over_subscribed(entry.run.topology)), None)
    if over and crowding:
        yield (
            f"{over['workers']} ranks share {over['cores']:g} cores, so they wait for each other's turn: "
            "times compare strategies on this machine, and say nothing about more machines."
        )
    yield from _slowed(record_set)
    yield from record_set.unread
    yield from (event["reason"] for event in record_set.events if event["event"] == "unproven")
    yield from _uneven(uneven)
    yield from _untracked(record_set)
    yield from _unplanned(record_set)
    yield from _drifts(record_set)
    yield from _divergences(record_set, uneven)


def _uneven(uneven: Mapping[str, float | None]) -> Iterator[str]:
    """Whose ranks differ in the time of a step, in one sentence."""
    found = {name: f"{100 * apart:.0f}" for name, apart in uneven.items() if apart is not None}
    if found:
        least, most = min(found.values(), key=int), max(found.values(), key=int)
        between = f"{least}%" if least == most else f"{least} to {most}%"
        yield (
            f"{_listed(list(found))}: time per iteration differs by {between} between ranks, "
            "which a synchronous run should not show."
        )


def slowed_on_purpose(run: RunRecord) -> str:
    """Which ranks of a run were made slow, as its configuration has it; empty where none was."""
    return format_slow_ranks(parse_slow_ranks(run.config.get("slow_rank") or ""))


def _slowed(record_set: RecordSet) -> Iterator[str]:
    """Ranks that were made slow, and in whose runs, where that is not all of them."""
    found: dict[str, list[str]] = {}
    for candidate in record_set.candidates:
        for what in dict.fromkeys(slowed_on_purpose(run) for run in record_set.runs_of(candidate.name).values()):
            found.setdefault(what, []).append(candidate.name)
    for what, names in found.items():
        if what:
            whose = "" if len(found) == 1 else f"{_listed(names)}: "
            yield f"{whose}{what if whose else what.capitalize()} on purpose (--slow-rank)."


def untracked_traffic(name: str, summary: Mapping[str, Any] | None) -> str | None:
    """What to say of a run that sent something past the groups that are timed; None where all of it was seen."""
    untracked = (summary or {}).get("untracked") or {}
    groups, operations = untracked.get("groups", 0), untracked.get("operations", 0)
    if groups:
        made = "1 process group" if groups == 1 else f"{groups} process groups"
        return (
            f"{name} made {made} of its own: what passes there is not in the time split. "
            "Groups of comm.subgroup(ranks) are seen."
        )
    if operations:
        return (
            f"{name} sent through groups that are not the run's, as torch's default one ({operations} operations): "
            "they are not in the time split. Send through comm.group."
        )
    return None


def unplanned_bytes(name: str, run: RunRecord) -> str | None:
    """What to say of a run whose sockets carried something else than was expected; None where they did not."""
    payload = payload_of(run)
    pair = None if payload is None or payload.holds is not False else payload.furthest
    if payload is None or pair is None:
        return None
    return (
        f"{name}: rank {pair.source} sent rank {pair.target} {pair.bytes:,.0f} bytes per step by the kernel's count, "
        f"but {payload.against} and its framing come to {pair.expected_bytes:,.0f}: something else was sent, or in "
        "another way."
    )


def _unplanned(record_set: RecordSet) -> Iterator[str]:
    for candidate in record_set.candidates:
        said = (unplanned_bytes(candidate.name, run) for run in record_set.runs_of(candidate.name).values())
        yield from list(filter(None, said))[:1]


def _untracked(record_set: RecordSet) -> Iterator[str]:
    for candidate in record_set.candidates:
        said = (untracked_traffic(candidate.name, run.summary) for run in record_set.runs_of(candidate.name).values())
        yield from list(filter(None, said))[:1]


def _drifts(record_set: RecordSet) -> Iterator[str]:
    """Replicas that are no longer the same, though nothing that was promised explains it."""
    for candidate in record_set.candidates:
        if candidate.role == "candidate" and candidate.lossless:
            runs = record_set.runs_of(candidate.name).values()
            apart = max([(run.summary or {}).get("weight_divergence") or 0.0 for run in runs], default=0.0)
            if apart > DRIFT:
                share = f"{100 * apart:.0f}%" if apart >= 0.01 else f"{100 * apart:.2g}%"
                yield (
                    f"{candidate.name}: the ranks' weights differ by {share} at the end of the run, "
                    "though it promises the same gradient on all."
                )


def _divergences(record_set: RecordSet, candidates: Iterable[str]) -> Iterator[str]:
    """Which runs lost their loss, and when: a figure without a number needs its reason."""
    found: dict[str, list[str]] = {}
    for name in candidates:
        curves = [loss_curve(run) for run in record_set.runs_of(name).values()]
        steps = [curve.diverged_step for curve in curves if curve.diverged_step is not None]
        if steps:
            share = "" if len(curves) == 1 else f" in {len(steps)} of {len(curves)} repeats"
            found.setdefault(f"the loss is not a number since step {min(steps)}{share}", []).append(name)
    for what, names in found.items():
        yield (
            f"{_listed(names)}: {what}. Averages leave that out; "
            "a lower learning rate or a clipped gradient may avoid it."
        )


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def over_subscribed(topology: Mapping[str, Any]) -> bool:
    """Whether the ranks of a host compute with more threads than it has cores; one thread may have a part of one."""
    threads = min(topology["workers"], topology["ranks_per_host"]) * topology["threads"]
    return bool(topology["device"] == "cpu" and threads > math.ceil(topology["cores"]))
