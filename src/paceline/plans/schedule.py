"""All-reduce algorithms as schedules of messages: those that each rank sends and receives, in order. Pure data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.plans.cuts import SEGMENT_KB
from paceline.plans.plan import Gradient, Operation, Plan, Transfer, backward_end


class Incoming(NamedTuple):
    """A message that a rank receives."""

    peer: int
    start: int
    end: int
    adds: bool
    """Whether it is added to the rank's values; else it replaces them."""
    step: int


class Outgoing(NamedTuple):
    """A message that a rank sends."""

    peer: int
    start: int
    end: int
    needs: int
    """Number of the rank's incoming messages that must have been received and added before it can be sent."""
    step: int


class Schedule(NamedTuple):
    """Messages of one rank in an all-reduce. Peers are positions among the participating ranks, not ranks.

    Lists are in the order in which a rank receives and sends. With several segments, a message may be of a later step
    than the one after it. Messages between two ranks are matched by their order, and carry no tag.
    """

    incoming: tuple[Incoming, ...]
    outgoing: tuple[Outgoing, ...]


@dataclass(frozen=True)
class AllReduceAlgorithm:
    """An all-reduce that consists of messages between ranks."""

    name: str
    schedule: Callable[[int, int, int, int, float], Schedule]
    """Returns the messages of one rank, given the items of the tensor, the bytes of an item, the position of the rank,
    the number of ranks, and the segment size in KiB."""

    def all_reduce(
        self, items: int, item_bytes: int, ranks: int, segment_kb: float = SEGMENT_KB, earliest_s: float = 0.0
    ) -> Operation:
        """Return the operation that consists of the messages of all ranks."""
        size, messages = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        for rank in range(ranks):
            for message in self.schedule(items, item_bytes, rank, ranks, segment_kb).outgoing:
                size[rank, message.peer] += (message.end - message.start) * item_bytes
                messages[rank, message.peer] += 1
        transfers = tuple(Transfer(*pair, size[pair], messages[pair]) for pair in size)
        return Operation("all_reduce", self.name, items * item_bytes, transfers, earliest_s)

    def plan(self, gradients: Sequence[Gradient], ranks: int, *, segment_kb: float = SEGMENT_KB, **_: Any) -> Plan:
        """Return one all-reduce per item size over all gradients of that size, after backward."""
        end = backward_end(gradients)
        packed = Counter[int]()
        for gradient in gradients if ranks > 1 else ():
            packed[gradient.item_bytes] += gradient.items
        return Plan(tuple(self.all_reduce(items, each, ranks, segment_kb, end) for each, items in packed.items()))
