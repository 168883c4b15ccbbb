"""Proof of bytes: bytes that the kernel counted between ranks, compared with the strategy's plan plus framing.

The proof holds if, for every pair of ranks, the bytes per step differ from the plan by at most 1%. Without a plan (a
user's strategy, or BatchNorm synchronised over ranks), the recorded operations take its place, as Gloo implements them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.analysis.steps.timing import profiled_steps, windows_of_attempt
from paceline.analysis.traffic.wire import analysed_steps
from paceline.plans import Operation, Plan, Transfer
from paceline.plans.operations import gloo_operation
from paceline.records import RunRecord
from paceline.records.summary import InterfaceTraffic, PairTraffic
from paceline.records.timeline import MESSAGES, Purpose, RowKind, Timeline
from paceline.records.writer import json_safe

TOLERANCE = 0.01
PLAN = "the plan"
RECORDED_OPERATIONS = "the recorded operations"


@dataclass(frozen=True)
class PairBytes:
    """Bytes per step from one rank to another."""

    source: int
    target: int
    bytes: float
    """Bytes that the kernel counted."""
    payload_bytes: float | None
    """Expected bytes of tensors; None if there is no expectation."""
    framing_bytes: float | None
    """Expected bytes that Gloo adds to them."""

    @property
    def expected_bytes(self) -> float | None:
        """Expected bytes of tensors and framing; None if there is no expectation."""
        return None if self.payload_bytes is None else self.payload_bytes + (self.framing_bytes or 0)

    @property
    def deviation(self) -> float | None:
        """Relative deviation of the count from the expectation; infinite if 0 bytes were expected."""
        expected = self.expected_bytes
        if expected is None:
            return None
        off = abs(self.bytes - expected)
        return off / expected if expected else float("inf") if off else 0.0


@dataclass(frozen=True)
class RankBytes:
    """Bytes per step that one rank sends and receives."""

    rank: int
    sent_bytes: float
    received_bytes: float
    planned_sent_bytes: float | None
    """Planned bytes of tensors."""
    planned_received_bytes: float | None
    framing_bytes: float | None
    """Framing in addition to the planned bytes that it sends."""
    retransmitted_bytes: float
    """Bytes that the kernel retransmitted; no other value includes them."""

    @property
    def over_plan(self) -> float | None:
        """Counted bytes ÷ planned bytes with framing; None if nothing is planned."""
        expected = None if self.planned_sent_bytes is None else self.planned_sent_bytes + (self.framing_bytes or 0)
        return self.sent_bytes / expected if expected else None


@dataclass(frozen=True)
class HostBytes:
    """Bytes per step on a host's network interface, of all processes and including headers."""

    interface: str
    ranks: list[int]
    sent_bytes: float
    received_bytes: float


@dataclass(frozen=True)
class Payload:
    """Bytes per step between all ranks."""

    steps: int
    """Number of counted steps."""
    expected_from: str | None
    """Source of the expected bytes: `PLAN` or `RECORDED_OPERATIONS`; None if there is no expectation."""
    pairs: list[PairBytes]
    ranks: list[RankBytes]
    hosts: list[HostBytes]

    @property
    def furthest(self) -> PairBytes | None:
        """Pair with the largest deviation; None if there is no expectation or no traffic."""
        known = [pair for pair in self.pairs if pair.deviation is not None]
        return max(known, key=lambda pair: pair.deviation or 0.0, default=None)

    @property
    def deviation(self) -> float | None:
        """Largest deviation of any pair; None if there is no expectation."""
        if self.expected_from is None:
            return None
        return 0.0 if self.furthest is None else self.furthest.deviation

    @property
    def holds(self) -> bool | None:
        """Whether the proof holds; None if there is no expectation."""
        return None if self.deviation is None else self.deviation <= TOLERANCE

    @property
    def matrix(self) -> list[list[float]]:
        """Bytes per step from each rank (row) to each rank (column)."""
        table = [[0.0] * len(self.ranks) for _ in self.ranks]
        for pair in self.pairs:
            table[pair.source][pair.target] = pair.bytes
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, with None for an infinite deviation."""
        derived = {"matrix": self.matrix, "deviation": self.deviation, "holds": self.holds, "tolerance": TOLERANCE}
        found: dict[str, Any] = json_safe(asdict(self) | derived)
        return found


def payload_of(run: RunRecord) -> Payload | None:
    """Return the byte counts of a run; None if there are none."""
    summary = run.summary
    if summary is None or summary.sockets is None:
        return None
    sockets = summary.sockets
    ranks, steps = len(summary.ranks) + summary.servers, sockets.steps
    expected_from, expected = _expected(run, ranks)
    counted = {(link.source, link.target): link for link in sockets.links}
    pairs = [
        PairBytes(
            source=pair[0],
            target=pair[1],
            bytes=counted[pair].received_bytes / steps if pair in counted else 0.0,
            payload_bytes=None if expected is None else expected.payload.get(pair, 0.0),
            framing_bytes=None if expected is None else expected.framing.get(pair, 0.0),
        )
        for pair in sorted(counted.keys() | (set() if expected is None else expected.framing.keys()))
    ]
    retransmitted = Counter[int]()
    for (source, _), link in counted.items():
        retransmitted[source] += link.retransmitted_bytes
    return Payload(
        steps=steps,
        expected_from=expected_from,
        pairs=pairs,
        ranks=[
            _rank(rank, pairs, retransmitted[rank] / steps, has_expectation=expected is not None)
            for rank in range(ranks)
        ],
        hosts=[_host(interface, steps) for interface in sockets.interfaces],
    )


@dataclass(frozen=True)
class _Expected:
    """Expected bytes per step by pair of ranks."""

    payload: Mapping[tuple[int, int], float]
    framing: Mapping[tuple[int, int], float]

    @classmethod
    def of(cls, links: Iterable[PairTraffic], steps: int = 1) -> _Expected:
        payload, framing = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        for link in links:
            pair = link.source, link.target
            payload[pair] += link.payload_bytes
            framing[pair] += link.framing_bytes
        return cls({pair: payload[pair] / steps for pair in framing}, {pair: framing[pair] / steps for pair in framing})


def _expected(run: RunRecord, ranks: int) -> tuple[str | None, _Expected | None]:
    """Return the source of the expectation and the expected bytes."""
    traffic = run.summary.traffic if run.summary else None
    if traffic is not None and traffic.links is not None:
        return PLAN, _Expected.of(traffic.links)
    if not run.lockstep:  # Asynchronous: the bytes of a pair depend on the speed of the ranks.
        return None, None
    steps = (
        analysed_steps(run.timelines[0], profiled_steps(windows_of_attempt(run))).tolist() if 0 in run.timelines else []
    )
    links = recorded_links(run.timelines, steps, ranks) if steps else None
    return (None, None) if links is None else (RECORDED_OPERATIONS, _Expected.of(links, len(steps)))


def recorded_links(timelines: Mapping[int, Timeline], steps: Sequence[int], ranks: int) -> list[PairTraffic] | None:
    """Return the traffic between ranks that the recorded operations of the given steps imply, summed over the steps.

    None if it is unknown: a rank's timeline is missing, an operation is unknown, or only a subgroup of the ranks
    participates in one.
    """
    if sorted(timelines) != list(range(ranks)):
        return None
    tallies = [_tally(timelines[rank], set(steps)) for rank in range(ranks)]
    collectives = [{key: count for key, count in tally.items() if key[0] not in MESSAGES} for tally in tallies]
    if any(tally != collectives[0] for tally in collectives):
        return None
    found: list[Operation] = []
    for (kind, size, root), count in collectives[0].items():
        operation = gloo_operation(kind.title, size, ranks, root)
        if operation is None:
            return None
        found.append(_times(operation, count))
    for rank, tally in enumerate(tallies):
        for (kind, size, peer), count in tally.items():
            if kind is RowKind.SEND:
                transfer = Transfer(rank, peer, size * count, count)
                found.append(Operation("send", "direct", size, (transfer,), 0.0))
    return Plan(tuple(found)).links()


def _times(operation: Operation, count: int) -> Operation:
    moved = [replace(t, bytes=t.bytes * count, messages=t.messages * count) for t in operation.transfers]
    return replace(operation, transfers=tuple(moved))


def _tally(timeline: Timeline, steps: set[int]) -> Counter[tuple[RowKind, int, int]]:
    """Count a rank's operations on the strategy's groups by kind, size and root or peer."""
    return Counter(
        (RowKind(kind), size, peer)
        for step, kind, purpose, size, peer in timeline.operations[
            ["step", "kind", "purpose", "bytes", "peer"]
        ].tolist()
        if purpose != Purpose.CONTROL and step in steps
    )


def _rank(rank: int, pairs: Sequence[PairBytes], retransmitted_bytes: float, *, has_expectation: bool) -> RankBytes:
    sent = [pair for pair in pairs if pair.source == rank]
    received = [pair for pair in pairs if pair.target == rank]
    return RankBytes(
        rank=rank,
        sent_bytes=sum(pair.bytes for pair in sent),
        received_bytes=sum(pair.bytes for pair in received),
        planned_sent_bytes=sum(pair.payload_bytes or 0 for pair in sent) if has_expectation else None,
        planned_received_bytes=sum(pair.payload_bytes or 0 for pair in received) if has_expectation else None,
        framing_bytes=sum(pair.framing_bytes or 0 for pair in sent) if has_expectation else None,
        retransmitted_bytes=retransmitted_bytes,
    )


def _host(interface: InterfaceTraffic, steps: int) -> HostBytes:
    sent, received = interface.sent_bytes / steps, interface.received_bytes / steps
    return HostBytes(interface.name, interface.ranks, sent, received)
