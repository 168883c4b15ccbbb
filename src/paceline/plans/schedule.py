"""Schedule of an all-reduce as messages: those that each rank sends and receives, in order. Pure data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from paceline.plans.plan import Operation, Transfer


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


def operation_of(
    algorithm: str, items: int, item_bytes: int, schedules: Sequence[Schedule], earliest_s: float
) -> Operation:
    """Return the operation that consists of the messages of all ranks' schedules."""
    size, messages = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for rank, schedule in enumerate(schedules):
        for message in schedule.outgoing:
            size[rank, message.peer] += (message.end - message.start) * item_bytes
            messages[rank, message.peer] += 1
    transfers = tuple(Transfer(*pair, size[pair], messages[pair]) for pair in size)
    return Operation("all_reduce", algorithm, items * item_bytes, transfers, earliest_s)
