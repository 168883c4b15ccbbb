"""The parts of a plan: gradients that become ready, operations on them, and the transfers these are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass


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

    def busiest_rank_bytes(self, ranks: int) -> int:
        """The most that any rank sends or receives, whichever is more: what a full-duplex link has to carry."""
        return max((max(self.sent_bytes(rank), self.received_bytes(rank)) for rank in range(ranks)), default=0)

    def __add__(self, other: Plan) -> Plan:
        return Plan(self.operations + other.operations)


def all_reduce_lower_bound(items: int, item_bytes: int, ranks: int) -> int:
    """The bytes that an all-reduce must move through its busiest rank: ⌈2(n−1)/n·X⌉ items."""
    return math.ceil(2 * (ranks - 1) * items / ranks) * item_bytes
