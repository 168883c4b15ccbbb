"""What was on the wire: how much of what, how fast, and who waited for whom; from the timelines of all ranks.

An asynchronous operation starts when it is enqueued, not when it is on the wire, so transfer, wait and bandwidth are
told of isolated operations only: those during which none of the ranks that took part had another under way. Where every
rank needs every other (all_reduce and its like), the transfer is the least duration over the ranks, and a rank's wait
is what its own is longer. An operation with a root, or between two ranks, cannot start before the last of those that it
depends on has come: what a rank spends until then is wait, by the ranks' common clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.analysis.steps.split import WARM_UP_STEPS, mean_split, split_steps
from paceline.analysis.traffic.rank_waits import FROM_ROOT, MESSAGES, TO_ROOT, TimelineRows, matching, rank_waits
from paceline.plans.operations import sent_by_rank
from paceline.plans.plan import all_reduce_lower_bound
from paceline.records.timeline import Purpose, RowKind, Timeline

Floats = npt.NDArray[np.float64]

MOST_STEPS = 200
"""Steps do the same again and again: more of them, evenly over the run, would only take longer."""


@dataclass(frozen=True)
class Traffic:
    """All operations of one kind that carry one thing."""

    kind: str
    purpose: str
    per_step: float
    """How many a rank takes part in, in a step."""
    bytes_per_step: float
    """Of their tensors, on the rank that has most of them."""
    duration_s: float
    """Of one of them, from its start to its end on a rank, on average."""
    isolated: float
    """The share of them that had the wire for themselves; what follows is about those, None where there are none."""
    transfer_s: float | None
    """Of one of them, on average."""
    wait_s: float | None
    """What a rank waited for others in one of them, on average."""
    algbw: float | None
    """Bytes per second: their size ÷ the time of transfer."""
    busbw: float | None
    """The same, times the share of the size that the busiest link has to carry."""


@dataclass(frozen=True)
class Wire:
    """The traffic of a run, per step."""

    ranks: int
    traffic: list[Traffic]
    sent_bytes: dict[str, list[int]]
    """By purpose: what each rank sends, going by the operations seen and how Gloo carries them out."""
    waits_s: list[float | None]
    """What each rank waited for others to come, computing nothing; None where that is not known."""
    waited_for: dict[int, float]
    """By rank: the share of all that waiting that was for this one."""
    exposed_s: float
    """Exposed communication in the same steps, on average over the ranks."""
    lower_bound_bytes: int | None
    """What the busiest rank must send at least to all-reduce the gradients; None where none were sent."""

    @property
    def busiest_bytes(self) -> int:
        """What the rank that sends most sends in all."""
        return max((sum(sizes) for sizes in zip(*self.sent_bytes.values(), strict=True)), default=0)

    @property
    def wait_s(self) -> float | None:
        """What a rank waited for others, on average; None where that is not known."""
        known = [wait_s for wait_s in self.waits_s if wait_s is not None]
        return float(np.mean(known)) if known else None

    @property
    def held_up_by(self) -> int | None:
        """The rank that the others waited for most."""
        return max(self.waited_for, key=self.waited_for.__getitem__) if self.waited_for else None


def bus_factor(kind: RowKind, ranks: int) -> float:
    """The share of an operation's size that goes through its busiest link."""
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
    """The traffic of a run; `gradient_bytes` are those of the model. None without timelines of all ranks.

    Steps named in `without` do not count.
    """
    ranks = len(timelines)
    if not ranks or sorted(timelines) != list(range(ranks)):
        return None
    counted = counted_steps(timelines[0], without)
    steps = len(counted)
    if not steps:
        return None
    operations = [timelines[rank].operations for rank in range(ranks)]
    if not all(_peers_are_here(own, ranks) for own in operations):
        return None
    rows = [own[np.isin(own["step"], counted)] for own in operations]
    instances = [*_collectives(rows), *_messages(rows)]
    waits = rank_waits(timelines, counted)
    sends = any((own["purpose"] == Purpose.GRADIENTS).any() for own in rows)
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
    """One isolated operation, as all that took part in it saw it."""

    kind: RowKind
    purpose: Purpose
    bytes: int
    waits_s: Sequence[float]
    """Of those that may have to wait in it."""
    transfer_s: float


def _peers_are_here(rows: TimelineRows, ranks: int) -> bool:
    """Whether these are all ranks: those of one host alone name peers that are not among them."""
    rooted = np.isin(rows["kind"], (*FROM_ROOT, *TO_ROOT))
    return bool((rows["peer"] < ranks).all() and (rows["peer"][rooted] >= 0).all())


def _exposed_s(timelines: Mapping[int, Timeline], steps: npt.NDArray[np.uint32]) -> float:
    counted = set(steps.tolist())
    splits = [step.split for own in timelines.values() for step in split_steps(own) if step.step in counted]
    mean = mean_split(splits)
    return 0.0 if mean is None else mean.exposed_s


def counted_steps(timeline: Timeline, without: Collection[int]) -> npt.NDArray[np.uint32]:
    """The steps that count: those after the warm-up, if there are any, and no more than are needed."""
    steps: npt.NDArray[np.uint32] = timeline.steps["step"]
    steps = steps[~np.isin(steps, list(without))]
    later = steps[steps >= WARM_UP_STEPS]
    counted = later if len(later) else steps
    return counted[np.unique(np.linspace(0, len(counted) - 1, MOST_STEPS).astype(int))] if len(counted) else counted


def _isolated(rows: TimelineRows) -> npt.NDArray[np.bool_]:
    """Which of a rank's operations, in the order of their start, overlap no other."""
    if not len(rows):
        return np.zeros(0, dtype=np.bool_)
    before = np.concatenate([[-np.inf], np.maximum.accumulate(rows["end_s"])[:-1]])
    after = np.concatenate([rows["start_s"][1:], [np.inf]])
    found: npt.NDArray[np.bool_] = (before <= rows["start_s"]) & (rows["end_s"] <= after)
    return found


def _collectives(rows: Sequence[TimelineRows]) -> list[IsolatedOperation]:
    """Isolated collectives; the n-th of a step that carries the same is the n-th on all ranks."""
    places = [matching(own) for own in rows]
    own_rows = [own[order] for own, order in zip(rows, places, strict=True)]
    own_isolated = [_isolated(own)[order] for own, order in zip(rows, places, strict=True)]
    if len({len(own) for own in own_rows}) > 1 or not len(own_rows[0]):
        return []  # A run that was cut short: the ranks' files do not end with the same operation.
    what = ["step", "kind", "purpose"]
    if any(not np.array_equal(own[what], own_rows[0][what]) for own in own_rows):
        return []
    alone = np.logical_and.reduce(own_isolated)
    starts = np.stack([own["start_s"] for own in own_rows])[:, alone]
    ends = np.stack([own["end_s"] for own in own_rows])[:, alone]
    return [_collective(row, starts[:, number], ends[:, number]) for number, row in enumerate(own_rows[0][alone])]


def _collective(row: Any, starts: Floats, ends: Floats) -> IsolatedOperation:
    kind, root, durations = RowKind(int(row["kind"])), int(row["peer"]), ends - starts
    others = np.arange(len(starts)) != root
    if kind in TO_ROOT:
        arrivals = np.full_like(starts, starts[root])  # A sender needs the root alone, the root needs all.
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
    """Isolated messages: the n-th that a rank sends to another is the n-th that the other receives from it."""
    isolated = [_isolated(own) for own in rows]
    found = []
    for target, own in enumerate(rows):
        for source in range(len(rows)):
            there = _between(own, RowKind.RECV, source)
            sent = _between(rows[source], RowKind.SEND, target)
            if len(there) != len(sent):
                continue
            for index, other in zip(there, sent, strict=True):
                if isolated[target][index] and isolated[source][other]:
                    found.append(_message(rows[source][other], own[index]))
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
    for own in rows:
        for kind, purpose in {(int(row["kind"]), int(row["purpose"])) for row in own}:
            groups[kind, purpose].append(own[(own["kind"] == kind) & (own["purpose"] == purpose)])
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
    most = max(len(own) for own in rows)
    seen = len(whole) if kind in MESSAGES else most  # A message is received by one rank, a collective done by all.
    transfer_s = sum(max(0.0, one.transfer_s) for one in alone)
    algbw = sum(one.bytes for one in alone) / transfer_s if transfer_s > 0 else None
    waits = [wait_s for one in alone for wait_s in one.waits_s]
    return Traffic(
        kind=kind.title,
        purpose=purpose.title,
        per_step=most / steps,
        bytes_per_step=max(int(own["bytes"].sum()) for own in rows) / steps,
        duration_s=float((whole["end_s"] - whole["start_s"]).mean()),
        isolated=len(alone) / seen,
        transfer_s=transfer_s / len(alone) if alone else None,
        wait_s=float(np.mean(waits)) if waits else None,
        algbw=algbw,
        busbw=None if algbw is None else algbw * bus_factor(kind, ranks),
    )


def _sent(rows: Sequence[TimelineRows], steps: int) -> dict[str, list[int]]:
    """By purpose, what each rank sends in a step."""
    sent: dict[str, list[float]] = {}
    for rank, own in enumerate(rows):
        alike, counts = np.unique(own[["kind", "purpose", "peer", "bytes"]], return_counts=True)
        for (kind, purpose, root, size), count in zip(alike.tolist(), counts.tolist(), strict=True):
            of_rank = sent_by_rank(RowKind(kind).title, size, len(rows), root, rank)
            sent.setdefault(Purpose(purpose).title, [0.0] * len(rows))[rank] += of_rank * count / steps
    return {purpose: [round(size) for size in sizes] for purpose, sizes in sent.items()}
