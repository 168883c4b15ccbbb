"""Traffic of a run: sizes, bandwidths and waits of its operations, from the timelines of all ranks.

An asynchronous operation starts when it is enqueued, not when its transfer starts. Transfer time, wait and bandwidth
are therefore reported only for isolated operations: those during which no participating rank had another in progress.
If every rank needs every other (all-reduce and similar collectives), the transfer time is the shortest duration over
the ranks, and a rank's wait is the rest of its duration. An operation with a root, or between two ranks, cannot start
before the last rank that it depends on: the time until then is wait, on the common clock of the ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.analysis.steps.split import after_warm_up, mean_split, split_steps
from paceline.analysis.traffic.rank_waits import FROM_ROOT, TO_ROOT, TimelineRows, matching, rank_waits
from paceline.plans.operations import sent_by_rank
from paceline.plans.plan import all_reduce_lower_bound
from paceline.records.timeline import MESSAGES, Purpose, RowKind, Timeline

Floats = npt.NDArray[np.float64]

MAX_STEPS = 200
"""Largest number of steps, evenly spaced over the run, that is analysed; more would only take longer."""


@dataclass(frozen=True)
class Traffic:
    """All operations of one kind and purpose."""

    kind: str
    purpose: str
    per_step: float
    """Operations per step that a rank participates in."""
    bytes_per_step: float
    """Bytes of their tensors per step, on the rank with the most."""
    duration_s: float
    """Mean duration of an operation, from start to end on a rank."""
    isolated: float
    """Share of isolated operations. The following values cover only those, and are None if there are none."""
    transfer_s: float | None
    """Mean transfer time of an operation."""
    wait_s: float | None
    """Mean wait of a rank for others in an operation."""
    algbw: float | None
    """Algorithm bandwidth in bytes per second: size ÷ transfer time."""
    busbw: float | None
    """Bus bandwidth in bytes per second: algbw × share of the size on the busiest link."""

    @property
    def bytes_each(self) -> float:
        """Mean bytes of an operation's tensor."""
        return self.bytes_per_step / self.per_step if self.per_step else 0.0


@dataclass(frozen=True)
class Wire:
    """Traffic of a run, per step."""

    ranks: int
    traffic: list[Traffic]
    sent_bytes: dict[str, list[int]]
    """Bytes that each rank sends, by purpose, computed from the recorded operations as Gloo implements them."""
    waits_s: list[float | None]
    """Seconds that each rank waited for others without computing; None if unknown."""
    waited_for: dict[int, float]
    """Share of all waiting that each rank caused."""
    exposed_s: float
    """Exposed communication in the same steps, averaged over ranks."""
    lower_bound_bytes: int | None
    """Fewest bytes that the busiest rank must send to all-reduce the gradients; None if no gradients were sent."""

    @property
    def busiest_bytes(self) -> int:
        """Total bytes of the rank that sends most."""
        return max((sum(sizes) for sizes in zip(*self.sent_bytes.values(), strict=True)), default=0)

    @property
    def wait_s(self) -> float | None:
        """Mean wait of a rank for others; None if unknown."""
        known = [wait_s for wait_s in self.waits_s if wait_s is not None]
        return float(np.mean(known)) if known else None

    @property
    def straggler(self) -> int | None:
        """Rank that the others waited for most; None if there were no waits."""
        return max(self.waited_for, key=self.waited_for.__getitem__) if self.waited_for else None


def bus_factor(kind: RowKind, ranks: int) -> float:
    """Return the share of an operation's size that crosses its busiest link."""
    if kind is RowKind.ALL_REDUCE:
        return 2 * (ranks - 1) / ranks
    if kind in (RowKind.REDUCE_SCATTER, RowKind.ALL_GATHER, RowKind.GATHER, RowKind.SCATTER, RowKind.ALL_TO_ALL):
        return (ranks - 1) / ranks
    return 1.0


def wire_of(
    timelines: Mapping[int, Timeline],
    gradient_bytes: int | None = None,
    item_bytes: int = 4,
    without: Collection[int] = (),
) -> Wire | None:
    """Return the traffic of a run; None without the timelines of all ranks.

    `gradient_bytes` is the size of the model's gradient. Steps in `without` are excluded.
    """
    ranks = len(timelines)
    if not ranks or sorted(timelines) != list(range(ranks)):
        return None
    counted = analysed_steps(timelines[0], without)
    steps = len(counted)
    if not steps:
        return None
    operations = [timelines[rank].operations for rank in range(ranks)]
    if not all(_has_all_peers(rank_rows, ranks) for rank_rows in operations):
        return None
    rows = [rank_rows[np.isin(rank_rows["step"], counted)] for rank_rows in operations]
    instances = [*_collectives(rows), *_messages(rows)]
    waits = rank_waits(timelines, counted)
    sends = any((rank_rows["purpose"] == Purpose.GRADIENTS).any() for rank_rows in rows)
    bound = (
        all_reduce_lower_bound(gradient_bytes // item_bytes, item_bytes, ranks) if gradient_bytes and sends else None
    )
    return Wire(
        ranks=ranks,
        traffic=_traffic(rows, instances, steps),
        sent_bytes=_sent(rows, steps),
        waits_s=[None] * ranks if waits is None else list(waits.waits_s),
        waited_for={} if waits is None else waits.waited_for,
        exposed_s=_exposed_s(timelines, counted),
        lower_bound_bytes=bound,
    )


@dataclass(frozen=True)
class IsolatedOperation:
    """One isolated operation over all participating ranks."""

    kind: RowKind
    purpose: Purpose
    bytes: int
    waits_s: Sequence[float]
    """Waits of the ranks that may have to wait in it."""
    transfer_s: float


def _has_all_peers(rows: TimelineRows, ranks: int) -> bool:
    """Return whether all peers are among the ranks; timelines of only one host name peers on other hosts."""
    rooted = np.isin(rows["kind"], (*FROM_ROOT, *TO_ROOT))
    return bool((rows["peer"] < ranks).all() and (rows["peer"][rooted] >= 0).all())


def _exposed_s(timelines: Mapping[int, Timeline], steps: npt.NDArray[np.uint32]) -> float:
    counted = set(steps.tolist())
    splits = [step.split for timeline in timelines.values() for step in split_steps(timeline) if step.step in counted]
    mean = mean_split(splits)
    return 0.0 if mean is None else mean.exposed_s


def analysed_steps(timeline: Timeline, without: Collection[int]) -> npt.NDArray[np.uint32]:
    """Return the steps to analyse: at most `MAX_STEPS`, after the warm-up if there are any."""
    steps: npt.NDArray[np.uint32] = timeline.steps["step"]
    steps = steps[~np.isin(steps, list(without))]
    counted = steps[after_warm_up(steps)]
    return counted[np.unique(np.linspace(0, len(counted) - 1, MAX_STEPS).astype(int))] if len(counted) else counted


def _isolated(rows: TimelineRows) -> npt.NDArray[np.bool_]:
    """Return a mask of a rank's operations, ordered by start, that overlap no other."""
    if not len(rows):
        return np.zeros(0, dtype=np.bool_)
    before = np.concatenate([[-np.inf], np.maximum.accumulate(rows["end_s"])[:-1]])
    after = np.concatenate([rows["start_s"][1:], [np.inf]])
    found: npt.NDArray[np.bool_] = (before <= rows["start_s"]) & (rows["end_s"] <= after)
    return found


def _collectives(rows: Sequence[TimelineRows]) -> list[IsolatedOperation]:
    """Return the isolated collectives; the n-th of a step and purpose is the same operation on all ranks."""
    orders = [matching(rank_rows) for rank_rows in rows]
    matched = [rank_rows[order] for rank_rows, order in zip(rows, orders, strict=True)]
    matched_isolated = [_isolated(rank_rows)[order] for rank_rows, order in zip(rows, orders, strict=True)]
    if len({len(rank_rows) for rank_rows in matched}) > 1 or not len(matched[0]):
        return []  # Interrupted run: the ranks' files end with different operations.
    key = ["step", "kind", "purpose"]
    if any(not np.array_equal(rank_rows[key], matched[0][key]) for rank_rows in matched):
        return []
    alone = np.logical_and.reduce(matched_isolated)
    starts = np.stack([rank_rows["start_s"] for rank_rows in matched])[:, alone]
    ends = np.stack([rank_rows["end_s"] for rank_rows in matched])[:, alone]
    return [_collective(row, starts[:, number], ends[:, number]) for number, row in enumerate(matched[0][alone])]


def _collective(row: Any, starts: Floats, ends: Floats) -> IsolatedOperation:
    kind, root, durations = RowKind(int(row["kind"])), int(row["peer"]), ends - starts
    others = np.arange(len(starts)) != root
    if kind in TO_ROOT:
        arrivals = np.full_like(starts, starts[root])  # A sender depends only on the root, the root on all ranks.
        arrivals[root] = starts.max()
        transfer_s = float(ends[root] - starts.max())
    elif kind in FROM_ROOT:
        arrivals = np.full_like(starts, starts[root])
        transfer_s = float((ends - np.maximum(starts, starts[root]))[others].max()) if others.any() else 0.0
    else:
        transfer_s = float(durations.min())
        arrivals = starts + durations - transfer_s
    waits = np.clip(arrivals - starts, 0.0, durations)
    if kind in FROM_ROOT:
        waits = waits[others]
    return IsolatedOperation(kind, Purpose(int(row["purpose"])), int(row["bytes"]), waits.tolist(), transfer_s)


def _messages(rows: Sequence[TimelineRows]) -> list[IsolatedOperation]:
    """Return the isolated messages; the n-th message sent to a rank is the n-th that it receives from the sender."""
    isolated = [_isolated(rank_rows) for rank_rows in rows]
    found = []
    for target, rank_rows in enumerate(rows):
        for source in range(len(rows)):
            received = _between(rank_rows, RowKind.RECV, source)
            sent = _between(rows[source], RowKind.SEND, target)
            if len(received) != len(sent):
                continue
            for index, other in zip(received, sent, strict=True):
                if isolated[target][index] and isolated[source][other]:
                    found.append(_message(rows[source][other], rank_rows[index]))
    return found


def _between(rows: TimelineRows, kind: RowKind, peer: int) -> npt.NDArray[np.intp]:
    return np.flatnonzero((rows["kind"] == kind) & (rows["peer"] == peer))


def _message(sent: Any, received: Any) -> IsolatedOperation:
    start_s, end_s = float(received["start_s"]), float(received["end_s"])
    arrival_s = min(max(start_s, float(sent["start_s"])), end_s)
    purpose, size = Purpose(int(received["purpose"])), int(received["bytes"])
    return IsolatedOperation(RowKind.RECV, purpose, size, (arrival_s - start_s,), end_s - arrival_s)


def _traffic(rows: Sequence[TimelineRows], instances: Sequence[IsolatedOperation], steps: int) -> list[Traffic]:
    groups: dict[tuple[int, int], list[TimelineRows]] = defaultdict(list)
    for rank_rows in rows:
        for kind, purpose in {(int(row["kind"]), int(row["purpose"])) for row in rank_rows}:
            groups[kind, purpose].append(rank_rows[(rank_rows["kind"] == kind) & (rank_rows["purpose"] == purpose)])
    return [
        _traffic_of(RowKind(kind), Purpose(purpose), members, instances, steps, len(rows))
        for (kind, purpose), members in sorted(groups.items())
    ]


def _traffic_of(
    kind: RowKind,
    purpose: Purpose,
    rows: Sequence[TimelineRows],
    instances: Sequence[IsolatedOperation],
    steps: int,
    ranks: int,
) -> Traffic:
    whole = np.concatenate(list(rows))
    alone = [one for one in instances if one.kind is kind and one.purpose is purpose]
    most = max(len(rank_rows) for rank_rows in rows)
    total = len(whole) if kind in MESSAGES else most  # Each message has one receiver; all ranks execute a collective.
    transfer_s = sum(max(0.0, one.transfer_s) for one in alone)
    algbw = sum(one.bytes for one in alone) / transfer_s if transfer_s > 0 else None
    waits = [wait_s for one in alone for wait_s in one.waits_s]
    return Traffic(
        kind=kind.title,
        purpose=purpose.title,
        per_step=most / steps,
        bytes_per_step=max(int(rank_rows["bytes"].sum()) for rank_rows in rows) / steps,
        duration_s=float((whole["end_s"] - whole["start_s"]).mean()),
        isolated=len(alone) / total,
        transfer_s=transfer_s / len(alone) if alone else None,
        wait_s=float(np.mean(waits)) if waits else None,
        algbw=algbw,
        busbw=None if algbw is None else algbw * bus_factor(kind, ranks),
    )


def _sent(rows: Sequence[TimelineRows], steps: int) -> dict[str, list[int]]:
    """Return the bytes that each rank sends per step, by purpose."""
    sent: dict[str, list[float]] = {}
    for rank, rank_rows in enumerate(rows):
        operations, counts = np.unique(rank_rows[["kind", "purpose", "peer", "bytes"]], return_counts=True)
        for (kind, purpose, root, size), count in zip(operations.tolist(), counts.tolist(), strict=True):
            of_rank = sent_by_rank(RowKind(kind).title, size, len(rows), root, rank)
            sent.setdefault(Purpose(purpose).title, [0.0] * len(rows))[rank] += of_rank * count / steps
    return {purpose: [round(size) for size in sizes] for purpose, sizes in sent.items()}
