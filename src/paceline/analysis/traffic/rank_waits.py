"""Who waited for whom, and how long: from the moments at which ranks came to the same operation, on one clock.

An operation cannot go on before those that it depends on have come: all ranks for an all_reduce and its like, the root
for those that get something from it or send something to it, all senders for the root that gathers, the sender for a
message. From its own start until then a rank waits, as far as it computes nothing meanwhile. The one that it waits for
may itself wait for another at that moment: then that one is to blame.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.analysis.steps.activity import WAITING, step_activities
from paceline.analysis.steps.intervals import Interval, difference, intersection, union
from paceline.records.timeline import RowKind, Timeline

TimelineRows = npt.NDArray[np.void]

FROM_ROOT = (RowKind.SCATTER, RowKind.BROADCAST)
TO_ROOT = (RowKind.GATHER, RowKind.REDUCE)
MESSAGES = (RowKind.SEND, RowKind.RECV)


class RankWait(NamedTuple):
    """From one moment to another a rank waits for another."""

    start_s: float
    end_s: float
    rank: int
    """The one that it waits for."""


@dataclass(frozen=True)
class RankWaits:
    """The waiting of a run, per step."""

    waits_s: list[float]
    """What each rank waited for others to come."""
    waited_for: dict[int, float]
    """By rank: the share of all that waiting that was for this one."""


def rank_waits(timelines: Mapping[int, Timeline], steps: npt.NDArray[np.uint32]) -> RankWaits | None:
    """The waiting in some steps; None where the ranks' operations do not match, as in a run that was cut short."""
    counted = set(steps.tolist())
    by_rank = [_by_step(timelines[rank], counted) for rank in range(len(timelines))]
    # What a step has sent may still be under way in the next one.
    and_next = counted | {step + 1 for step in counted}
    exposed = [_exposed(timelines[rank], and_next) for rank in range(len(timelines))]
    totals, blamed, matched = [0.0] * len(by_rank), defaultdict[int, float](float), 0
    for step in sorted(counted):
        rows = [own.get(step) for own in by_rank]
        if any(own is None for own in rows):
            continue
        idle = [[*own.get(step, []), *own.get(step + 1, [])] for own in exposed]
        found = step_waits([own for own in rows if own is not None], idle)
        if found is None:
            continue
        matched += 1
        for rank, waits in enumerate(found):
            taken = union((wait.start_s, wait.end_s) for wait in waits)
            exposed[rank][step + 1] = difference(exposed[rank].get(step + 1, []), taken)
            for wait in waits:
                totals[rank] += wait.end_s - wait.start_s
                for piece in traced(wait, found):
                    blamed[piece.rank] += piece.end_s - piece.start_s
    if not matched:
        return None
    total = sum(blamed.values())
    shares = {rank: share / total for rank, share in sorted(blamed.items())} if total else {}
    return RankWaits([seconds / matched for seconds in totals], shares)


def step_waits(rows: Sequence[TimelineRows], exposed: Sequence[Sequence[Interval]]) -> list[list[RankWait]] | None:
    """By rank, what it waited in one step: no two waits of a rank overlap. None where the operations do not match."""
    collectives = [own[matching(own)] for own in rows]
    if any(own["kind"].tolist() != collectives[0]["kind"].tolist() for own in collectives):
        return None
    pairs = [(source, target) for source in range(len(rows)) for target in range(len(rows)) if source != target]
    found: list[list[RankWait]] = [[] for _ in rows]
    for number, row in enumerate(collectives[0]):
        starts = [float(own["start_s"][number]) for own in collectives]
        ends = [float(own["end_s"][number]) for own in collectives]
        for rank, wait in _collective(RowKind(int(row["kind"])), int(row["peer"]), starts, ends):
            found[rank].append(wait)
    for source, target in pairs:
        sent, received = _between(rows[source], RowKind.SEND, target), _between(rows[target], RowKind.RECV, source)
        if len(sent) != len(received):
            return None
        for one, other in zip(sent, received, strict=True):
            came_s = min(float(one["start_s"]), float(other["end_s"]))
            found[target].append(RankWait(float(other["start_s"]), came_s, source))
    return [_exposed_parts(waits, own) for waits, own in zip(found, exposed, strict=True)]


def matching(rows: TimelineRows) -> npt.NDArray[np.intp]:
    """The places of a rank's collectives in an order that is the same on all ranks: by step, and by what they carry.

    Ranks start those of a step that carry the same in the same order. What carries something else may go by another
    group, and come a little earlier on one rank and later on another.
    """
    places = np.flatnonzero(~np.isin(rows["kind"], MESSAGES))
    return places[np.lexsort((rows["purpose"][places], rows["step"][places]))]


def traced(
    wait: RankWait, waits: Sequence[Sequence[RankWait]], passed: frozenset[int] = frozenset()
) -> Iterator[RankWait]:
    """The pieces of a wait, each with the rank that is to blame in the end."""
    rest: list[Interval] = [(wait.start_s, wait.end_s)]
    if wait.rank not in passed:
        for other in waits[wait.rank]:
            for start_s, end_s in intersection(rest, [(other.start_s, other.end_s)]):
                yield from traced(RankWait(start_s, end_s, other.rank), waits, passed | {wait.rank})
            rest = difference(rest, [(other.start_s, other.end_s)])
    for start_s, end_s in rest:
        yield RankWait(start_s, end_s, wait.rank)


def _collective(
    kind: RowKind, root: int, starts: Sequence[float], ends: Sequence[float]
) -> Iterator[tuple[int, RankWait]]:
    for rank, start_s in enumerate(starts):
        if kind in (*FROM_ROOT, *TO_ROOT) and rank != root:
            needed = [root]
        else:
            needed = [] if kind in FROM_ROOT else [other for other in range(len(starts)) if other != rank]
        if needed:
            last = max(needed, key=starts.__getitem__)
            yield rank, RankWait(start_s, min(starts[last], ends[rank]), last)


def _exposed_parts(waits: Sequence[RankWait], exposed: Sequence[Interval]) -> list[RankWait]:
    """The parts of waits in which nothing was computed; a moment that belongs to two belongs to the first."""
    found, taken = list[RankWait](), list[Interval]()
    for wait in sorted(waits):
        pieces = difference(intersection(union([(wait.start_s, wait.end_s)]), exposed), taken)
        found += [RankWait(start_s, end_s, wait.rank) for start_s, end_s in pieces]
        taken = union([*taken, *pieces])
    return found


def _between(rows: TimelineRows, kind: RowKind, peer: int) -> TimelineRows:
    found: TimelineRows = rows[(rows["kind"] == kind) & (rows["peer"] == peer)]
    return found


def _by_step(timeline: Timeline, steps: set[int]) -> dict[int, TimelineRows]:
    """The operations of some steps; an empty table for one that had none."""
    rows = timeline.operations
    rows = rows[np.argsort(rows["step"], kind="stable")]
    found = {}
    for step in steps & set(timeline.steps["step"].tolist()):
        found[step] = rows[slice(*np.searchsorted(rows["step"], [step, step + 1]))]
    return found


def _exposed(timeline: Timeline, steps: set[int]) -> dict[int, list[Interval]]:
    """By step, when this rank communicated and computed nothing."""
    return {
        step.step: union((a.start_s, a.end_s) for a in step.activities if a.what == WAITING)
        for step in step_activities(timeline, steps)
    }
