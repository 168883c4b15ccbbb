"""Parts of a plan: gradients, operations on them, and the transfers that an operation consists of."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.plans.framing import TO_RECEIVE_BYTES, TO_SEND_BYTES
from paceline.records.summary import PairTraffic


@dataclass(frozen=True)
class Gradient:
    """Gradient of one parameter; gradients are listed in the order of the model."""

    name: str
    items: int
    item_bytes: int = 4
    ready_s: float = 0.0
    """Time at which backward has computed it, since backward began."""

    @property
    def bytes(self) -> int:
        """Size of the gradient."""
        return self.items * self.item_bytes


@dataclass(frozen=True)
class Transfer:
    """Bytes sent from one rank to another in one operation."""

    source: int
    target: int
    bytes: int
    messages: int = 1
    """Number of messages; each has its framing (`framing.py`)."""


@dataclass(frozen=True)
class Operation:
    """One operation of `torch.distributed`, or one message where a strategy sends its own."""

    kind: str
    """all_reduce, gather, scatter, broadcast or send."""
    algorithm: str
    """Algorithm, such as ring, tree or direct."""
    bytes: int
    """Size of the tensor, as used in algorithm bandwidth."""
    transfers: tuple[Transfer, ...]
    earliest_s: float
    """Time at which its input is ready, since backward began."""


@dataclass(frozen=True)
class Plan:
    """Operations of a strategy in one step, in the order in which they are started."""

    operations: tuple[Operation, ...]

    def sent_bytes(self, rank: int) -> int:
        """Return the bytes that a rank sends."""
        return sum(t.bytes for operation in self.operations for t in operation.transfers if t.source == rank)

    def received_bytes(self, rank: int) -> int:
        """Return the bytes that a rank receives."""
        return sum(t.bytes for operation in self.operations for t in operation.transfers if t.target == rank)

    def links(self) -> list[PairTraffic]:
        """Return the traffic of each pair of ranks, in rank order, including the framing that receivers send back."""
        payload, framing = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        for transfer in (t for operation in self.operations for t in operation.transfers):
            forward, back = (transfer.source, transfer.target), (transfer.target, transfer.source)
            payload[forward] += transfer.bytes
            framing[forward] += TO_SEND_BYTES * transfer.messages
            framing[back] += TO_RECEIVE_BYTES * transfer.messages
        return [PairTraffic(*pair, payload[pair], framing[pair]) for pair in sorted(payload.keys() | framing.keys())]

    def busiest_rank_bytes(self, ranks: int) -> int:
        """Return the most bytes that any rank sends or receives: the load of the busiest full-duplex link."""
        return max((max(self.sent_bytes(rank), self.received_bytes(rank)) for rank in range(ranks)), default=0)

    def serial_link_bytes(self, ranks: int) -> int:
        """Return the bytes on the busiest rank's full-duplex link if operations run one after the other.

        In each operation, a rank takes as long as the larger of what it sends and receives.
        """
        plans = [Plan((operation,)) for operation in self.operations]
        return max(
            (sum(max(plan.sent_bytes(rank), plan.received_bytes(rank)) for plan in plans) for rank in range(ranks)),
            default=0,
        )

    def __add__(self, other: Plan) -> Plan:
        return Plan(self.operations + other.operations)


def backward_end(gradients: Sequence[Gradient]) -> float:
    """Return the time at which the last gradient is ready, in seconds since backward began."""
    return max((g.ready_s for g in gradients), default=0.0)


def all_reduce_lower_bound(items: int, item_bytes: int, ranks: int) -> int:
    """Return the least bytes that an all-reduce must send through its busiest rank: ⌈2(n−1)/n·X⌉ items."""
    return math.ceil(2 * (ranks - 1) * items / ranks) * item_bytes
