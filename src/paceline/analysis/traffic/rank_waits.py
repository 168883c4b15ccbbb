"""Waits of ranks for each other, from the times at which ranks start the same operation, on one clock.

An operation can proceed only after the ranks that it depends on have started it: all ranks for an all-reduce and
similar collectives, the root for ranks that receive from it or send to it, all senders for a root that gathers, the
sender for a message. Until then a rank waits, unless it computes meanwhile. If the rank that it waits for is itself
waiting for a third rank, the wait is attributed to the third.
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
from paceline.records.timeline import MESSAGES, RowKind, Timeline

TimelineRows = npt.NDArray[np.void]

FROM_ROOT = (RowKind.SCATTER, RowKind.BROADCAST)
TO_ROOT = (RowKind.GATHER, RowKind.REDUCE)


class RankWait(NamedTuple):
    """Interval in which a rank waits for another."""

    start_s: float
    end_s: float
    rank: int
    """Rank that it waits for."""


@dataclass(frozen=True)
class RankWaits:
    """Waits of a run, per step."""

    waits_s: list[float]
    """Seconds that each rank waited for others."""
    waited_for: dict[int, float]
    """Share of all waiting that each rank caused."""


def rank_waits(timelines: Mapping[int, Timeline], steps: npt.NDArray[np.uint32]) -> RankWaits | None:
    """Return the waits in the given steps; None if the ranks' operations do not match, as in an interrupted run."""
    counted = set(steps.tolist())
    by_rank = [_by_step(timelines[rank], counted) for rank in range(len(timelines))]
    # Operations of a step may still be in progress in the next one.
    and_next = counted | {step + 1 for step in counted}
    exposed = [_exposed(timelines[rank], and_next) for rank in range(len(timelines))]
    totals, caused, matched = [0.0] * len(by_rank), defaultdict[int, float](float), 0
    for step in sorted(counted):
        rows = [steps_of_rank.get(step) for steps_of_rank in by_rank]
        if any(rank_rows is None for rank_rows in rows):
            continue
        idle = [[*of_rank.get(step, []), *of_rank.get(step + 1, [])] for of_rank in exposed]
        found = step_waits([rank_rows for rank_rows in rows if rank_rows is not None], idle)
        if found is None:
            continue
        matched += 1
        for rank, waits in enumerate(found):
            taken = union((wait.start_s, wait.end_s) for wait in waits)
            exposed[rank][step + 1] = difference(exposed[rank].get(step + 1, []), taken)
            for wait in waits:
                totals[rank] += wait.end_s - wait.start_s
                for piece in trace_to_cause(wait, found):
                    caused[piece.rank] += piece.end_s - piece.start_s
    if not matched:
        return None
    total = sum(caused.values())
    shares = {rank: share / total for rank, share in sorted(caused.items())} if total else {}
    return RankWaits([seconds / matched for seconds in totals], shares)


def step_waits(rows: Sequence[TimelineRows], exposed: Sequence[Sequence[Interval]]) -> list[list[RankWait]] | None:
    """Return the waits of each rank in one step, without overlap; None if the ranks' operations do not match."""
    collectives = [rank_rows[matching(rank_rows)] for rank_rows in rows]
    if any(rank_rows["kind"].tolist() != collectives[0]["kind"].tolist() for rank_rows in collectives):
        return None
    pairs = [(source, target) for source in range(len(rows)) for target in range(len(rows)) if source != target]
    found: list[list[RankWait]] = [[] for _ in rows]
    for number, row in enumerate(collectives[0]):
        starts = [float(rank_rows["start_s"][number]) for rank_rows in collectives]
        ends = [float(rank_rows["end_s"][number]) for rank_rows in collectives]
        for rank, wait in _collective(RowKind(int(row["kind"])), int(row["peer"]), starts, ends):
            found[rank].append(wait)
    for source, target in pairs:
        sent, received = _between(rows[source], RowKind.SEND, target), _between(rows[target], RowKind.RECV, source)
        if len(sent) != len(received):
            return None
        for one, other in zip(sent, received, strict=True):
            arrival_s = min(float(one["start_s"]), float(other["end_s"]))
            found[target].append(RankWait(float(other["start_s"]), arrival_s, source))
    return [_exposed_parts(waits, intervals) for waits, intervals in zip(found, exposed, strict=True)]


def matching(rows: TimelineRows) -> npt.NDArray[np.intp]:
    """Return the indices of a rank's collectives in an order that is the same on all ranks: by step and purpose.

    All ranks start the collectives of one step and purpose in the same order. Collectives of another purpose may use
    another process group, so their position among the others may differ between ranks.
    """
    places = np.flatnonzero(~np.isin(rows["kind"], MESSAGES))
    return places[np.lexsort((rows["purpose"][places], rows["step"][places]))]


def trace_to_cause(
    wait: RankWait, waits: Sequence[Sequence[RankWait]], visited: frozenset[int] = frozenset()
) -> Iterator[RankWait]:
    """Yield the pieces of a wait, each with the rank that ultimately caused it."""
    rest: list[Interval] = [(wait.start_s, wait.end_s)]
    if wait.rank not in visited:
        for other in waits[wait.rank]:
            for start_s, end_s in intersection(rest, [(other.start_s, other.end_s)]):
                yield from trace_to_cause(RankWait(start_s, end_s, other.rank), waits, visited | {wait.rank})
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
    """Return the parts of waits without compute; where two waits overlap, the first takes precedence."""
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
    """Return the operations of the given steps; an empty array for a step without operations."""
    rows = timeline.operations
    rows = rows[np.argsort(rows["step"], kind="stable")]
    found = {}
    for step in steps & set(timeline.steps["step"].tolist()):
        found[step] = rows[slice(*np.searchsorted(rows["step"], [step, step + 1]))]
    return found


def _exposed(timeline: Timeline, steps: set[int]) -> dict[int, list[Interval]]:
    """Return the intervals of exposed communication of a rank, by step."""
    return {
        step.step: union((a.start_s, a.end_s) for a in step.activities if a.name == WAITING)
        for step in step_activities(timeline, steps)
    }
