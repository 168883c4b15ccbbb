"""Schedule of an all-reduce as messages: those that each rank sends and receives, in order. Pure data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.plans.classic import backward_end
from paceline.plans.plan import Gradient, Operation, Plan, Transfer


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

    Both lists are in the order of steps. Messages between two ranks are matched by their order, and carry no tag.
    """

    incoming: tuple[Incoming, ...]
    outgoing: tuple[Outgoing, ...]


MakeSchedule = Callable[[int, int, int, int, float], Schedule]
"""Schedule of one rank from the items, the bytes of an item, its position, the number of ranks and the KiB of a
message."""


def packed_plan(
    algorithm: str, schedule: MakeSchedule, gradients: Sequence[Gradient], ranks: int, segment_kb: float
) -> Plan:
    """Return one all-reduce per item size over all gradients of that size, after backward."""
    items = Counter[int]()
    for gradient in gradients if ranks > 1 else ():
        items[gradient.item_bytes] += gradient.items
    end = backward_end(gradients)
    return Plan(
        tuple(all_reduce_operation(algorithm, schedule, items[each], each, ranks, segment_kb, end) for each in items)
    )


def all_reduce_operation(
    algorithm: str,
    schedule: MakeSchedule,
    items: int,
    item_bytes: int,
    ranks: int,
    segment_kb: float,
    earliest_s: float = 0.0,
) -> Operation:
    """Return the all-reduce that consists of the messages of all ranks' schedules."""
    size, messages = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for rank in range(ranks):
        for message in schedule(items, item_bytes, rank, ranks, segment_kb).outgoing:
            size[rank, message.peer] += (message.end - message.start) * item_bytes
            messages[rank, message.peer] += 1
    transfers = tuple(Transfer(*pair, size[pair], messages[pair]) for pair in size)
    return Operation("all_reduce", algorithm, items * item_bytes, transfers, earliest_s)
