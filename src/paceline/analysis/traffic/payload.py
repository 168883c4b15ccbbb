"""The proof of bytes: what the kernel counted between ranks, against the strategy's plan and its framing.

It holds where every rank sends every other, in a step, what was planned for the two of them, within 1%. A strategy
without a plan (one's own, or BatchNorm that normalises over all ranks) is held against the operations that were seen on
its groups instead, as Gloo carries them out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.analysis.steps.timing import profiled_steps, windows_of
from paceline.analysis.traffic.wire import counted_steps
from paceline.plans import Operation, PairTraffic, Plan, Transfer
from paceline.plans.operations import gloo_operation
from paceline.records import RunRecord
from paceline.records.timeline import Purpose, RowKind, Timeline
from paceline.records.writer import strict

TOLERANCE = 0.01
PLAN = "the plan"
SEEN = "the operations seen"


@dataclass(frozen=True)
class PairBytes:
    """What one rank sends another in a step."""

    source: int
    target: int
    bytes: float
    """By the kernel's count."""
    payload_bytes: float | None
    """Of tensors, as expected; None where nothing says what to expect."""
    framing_bytes: float | None
    """What Gloo should add to them."""

    @property
    def expected_bytes(self) -> float | None:
        """Both together."""
        return None if self.payload_bytes is None else self.payload_bytes + (self.framing_bytes or 0)

    @property
    def deviation(self) -> float | None:
        """How far the count is from what was expected, as a share of that; infinite where nothing was."""
        expected = self.expected_bytes
        if expected is None:
            return None
        off = abs(self.bytes - expected)
        return off / expected if expected else float("inf") if off else 0.0


@dataclass(frozen=True)
class RankBytes:
    """What one rank sends and receives in a step."""

    rank: int
    sent_bytes: float
    received_bytes: float
    planned_sent_bytes: float | None
    """Of tensors."""
    planned_received_bytes: float | None
    framing_bytes: float | None
    """What comes on top of what it sends."""
    resent_bytes: float
    """What the kernel had to send again, which is not in any other figure."""


@dataclass(frozen=True)
class HostBytes:
    """What a host's network interface carried in a step, whoever made it do so, headers and all."""

    interface: str
    ranks: list[int]
    sent_bytes: float
    received_bytes: float


@dataclass(frozen=True)
class Payload:
    """Who sent how much to whom, per step."""

    steps: int
    """Those that were counted."""
    against: str | None
    """What the count is held against: `PLAN`, `SEEN`, or nothing."""
    pairs: list[PairBytes]
    ranks: list[RankBytes]
    hosts: list[HostBytes]

    @property
    def furthest(self) -> PairBytes | None:
        """The pair that is furthest from what was expected; None where nothing was, or nobody sends anything."""
        known = [pair for pair in self.pairs if pair.deviation is not None]
        return max(known, key=lambda pair: pair.deviation or 0.0, default=None)

    @property
    def deviation(self) -> float | None:
        """How far that one is; None where nothing says what to expect."""
        if self.against is None:
            return None
        return 0.0 if self.furthest is None else self.furthest.deviation

    @property
    def holds(self) -> bool | None:
        """Whether the proof holds; None where there is nothing to hold the count against."""
        return None if self.deviation is None else self.deviation <= TOLERANCE

    @property
    def matrix(self) -> list[list[float]]:
        """Row by row what each rank sends to each."""
        table = [[0.0] * len(self.ranks) for _ in self.ranks]
        for pair in self.pairs:
            table[pair.source][pair.target] = pair.bytes
        return table

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: null for what is infinitely far off."""
        derived = {"matrix": self.matrix, "deviation": self.deviation, "holds": self.holds, "tolerance": TOLERANCE}
        found: dict[str, Any] = strict(asdict(self) | derived)
        return found


def payload_of(run: RunRecord) -> Payload | None:
    """What was counted in a run; None where nothing was."""
    summary = run.summary or {}
    sockets = summary.get("sockets")
    if not sockets:
        return None
    ranks, steps = len(summary["ranks"]) + summary.get("servers", 0), sockets["steps"]
    against, expected = _expected(run, ranks)
    counted = {(link["source"], link["target"]): link for link in sockets["links"]}
    pairs = [
        PairBytes(
            source=pair[0],
            target=pair[1],
            bytes=counted[pair]["received_bytes"] / steps if pair in counted else 0.0,
            payload_bytes=None if expected is None else expected.payload.get(pair, 0.0),
            framing_bytes=None if expected is None else expected.framing.get(pair, 0.0),
        )
        for pair in sorted(counted.keys() | (set() if expected is None else expected.framing.keys()))
    ]
    resent = Counter[int]()
    for (source, _), link in counted.items():
        resent[source] += link["resent_bytes"]
    return Payload(
        steps=steps,
        against=against,
        pairs=pairs,
        ranks=[_rank(rank, pairs, resent[rank] / steps, against) for rank in range(ranks)],
        hosts=[_host(interface, steps) for interface in sockets["interfaces"]],
    )


@dataclass(frozen=True)
class _Expected:
    """Bytes per step by pair of ranks."""

    payload: Mapping[tuple[int, int], float]
    framing: Mapping[tuple[int, int], float]

    @classmethod
    def of(cls, links: Iterable[Mapping[str, Any]], steps: int = 1) -> _Expected:
        payload, framing = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        for link in links:
            pair = link["source"], link["target"]
            payload[pair] += link["payload_bytes"]
            framing[pair] += link["framing_bytes"]
        return cls({pair: payload[pair] / steps for pair in framing}, {pair: framing[pair] / steps for pair in framing})


def _expected(run: RunRecord, ranks: int) -> tuple[str | None, _Expected | None]:
    """What to hold the count against, and in which words."""
    traffic = (run.summary or {}).get("traffic")
    if traffic is not None and "links" in traffic:
        return PLAN, _Expected.of(traffic["links"])
    if not run.lockstep:  # Who sends how much depends on who is fast.
        return None, None
    steps = counted_steps(run.timelines[0], profiled_steps(windows_of(run))).tolist() if 0 in run.timelines else []
    seen = seen_links(run.timelines, steps, ranks) if steps else None
    return (None, None) if seen is None else (SEEN, _Expected.of(map(asdict, seen), len(steps)))


def seen_links(timelines: Mapping[int, Timeline], steps: Sequence[int], ranks: int) -> list[PairTraffic] | None:
    """What the operations seen in some steps should have sent from rank to rank, over all of these steps.

    None where that cannot be told: a rank's timeline is missing, an operation is not known, or some ranks alone take
    part in one, as in a subgroup.
    """
    if sorted(timelines) != list(range(ranks)):
        return None
    own = [_tally(timelines[rank], set(steps)) for rank in range(ranks)]
    together = [
        {key: count for key, count in tally.items() if key[0] not in (RowKind.SEND, RowKind.RECV)} for tally in own
    ]
    if any(tally != together[0] for tally in together):
        return None
    found: list[Operation] = []
    for (kind, size, root), count in together[0].items():
        operation = gloo_operation(kind.title, size, ranks, root)
        if operation is None:
            return None
        found.append(_times(operation, count))
    for rank, tally in enumerate(own):
        for (kind, size, peer), count in tally.items():
            if kind is RowKind.SEND:
                transfer = Transfer(rank, peer, size * count, count)
                found.append(Operation("send", "direct", size, (transfer,), 0.0))
    return Plan(tuple(found)).links()


def _times(operation: Operation, count: int) -> Operation:
    moved = [replace(t, bytes=t.bytes * count, messages=t.messages * count) for t in operation.transfers]
    return replace(operation, transfers=tuple(moved))


def _tally(timeline: Timeline, steps: set[int]) -> Counter[tuple[RowKind, int, int]]:
    """How often a rank took part in operations of one kind, size and root or peer, on the strategy's groups."""
    return Counter(
        (RowKind(kind), size, peer)
        for step, kind, purpose, size, peer in timeline.operations[
            ["step", "kind", "purpose", "bytes", "peer"]
        ].tolist()
        if purpose != Purpose.AGREEMENT and step in steps
    )


def _rank(rank: int, pairs: Sequence[PairBytes], resent: float, against: str | None) -> RankBytes:
    sent = [pair for pair in pairs if pair.source == rank]
    received = [pair for pair in pairs if pair.target == rank]
    known = against is not None
    return RankBytes(
        rank=rank,
        sent_bytes=sum(pair.bytes for pair in sent),
        received_bytes=sum(pair.bytes for pair in received),
        planned_sent_bytes=sum(pair.payload_bytes or 0 for pair in sent) if known else None,
        planned_received_bytes=sum(pair.payload_bytes or 0 for pair in received) if known else None,
        framing_bytes=sum(pair.framing_bytes or 0 for pair in sent) if known else None,
        resent_bytes=resent,
    )


def _host(interface: Mapping[str, Any], steps: int) -> HostBytes:
    sent, received = interface["sent_bytes"] / steps, interface["received_bytes"] / steps
    return HostBytes(interface["name"], list(interface["ranks"]), sent, received)
