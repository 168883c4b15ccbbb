"""The parts of a plan: gradients that become ready, operations on them, and the transfers these are made of."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from paceline.plans.framing import TO_RECEIVE_BYTES, TO_SEND_BYTES


@dataclass(frozen=True)
class Gradient:
    """One parameter's gradient, in the order of the model."""

    name: str
    items: int
    item_bytes: int = 4
    ready_s: float = 0.0
    """When backward has computed it, since backward began."""

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.items * self.item_bytes


@dataclass(frozen=True)
class Transfer:
    """Bytes that go from one rank to another."""

    source: int
    target: int
    bytes: int
    messages: int = 1
    """In how many messages; each has its framing (`framing.py`)."""


@dataclass(frozen=True)
class PairTraffic:
    """All that goes from one rank to another."""

    source: int
    target: int
    payload_bytes: int
    """Of tensors."""
    framing_bytes: int
    """What Gloo adds to them, and to those that go the other way."""


@dataclass(frozen=True)
class Operation:
    """One operation of `torch.distributed`, or one message where a strategy sends its own."""

    kind: str
    """all_reduce, gather, scatter, broadcast or send."""
    algorithm: str
    """How it is carried out: ring, tree or direct."""
    bytes: int
    """The size of the tensor it is about, as algorithm bandwidth counts it."""
    transfers: tuple[Transfer, ...]
    earliest_s: float
    """When its input is ready, since backward began."""


@dataclass(frozen=True)
class Plan:
    """All that a strategy sends in one step, in the order in which it is started."""

    operations: tuple[Operation, ...]

    def sent_bytes(self, rank: int) -> int:
        """What one rank sends."""
        return sum(t.bytes for operation in self.operations for t in operation.transfers if t.source == rank)

    def received_bytes(self, rank: int) -> int:
        """What one rank receives."""
        return sum(t.bytes for operation in self.operations for t in operation.transfers if t.target == rank)

    def links(self) -> list[PairTraffic]:
        """What goes from one rank to another, in the order of ranks; what receivers send back among it."""
        payload, framing = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        for transfer in (t for operation in self.operations for t in operation.transfers):
            there, back = (transfer.source, transfer.target), (transfer.target, transfer.source)
            payload[there] += transfer.bytes
            framing[there] += TO_SEND_BYTES * transfer.messages
            framing[back] += TO_RECEIVE_BYTES * transfer.messages
        return [PairTraffic(*pair, payload[pair], framing[pair]) for pair in sorted(payload.keys() | framing.keys())]

    def busiest_rank_bytes(self, ranks: int) -> int:
        """The most that any rank sends or receives, whichever is more: what a full-duplex link has to carry."""
        return max((max(self.sent_bytes(rank), self.received_bytes(rank)) for rank in range(ranks)), default=0)

    def __add__(self, other: Plan) -> Plan:
        return Plan(self.operations + other.operations)


def all_reduce_lower_bound(items: int, item_bytes: int, ranks: int) -> int:
    """The bytes that an all-reduce must move through its busiest rank: ⌈2(n−1)/n·X⌉ items."""
    return math.ceil(2 * (ranks - 1) * items / ranks) * item_bytes
