"""The messages of an all-reduce that ranks carry out themselves: what each sends and receives, in order. Pure."""

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
    """Whether it is added to what is there, or takes its place."""
    step: int


class Outgoing(NamedTuple):
    """A message that a rank sends."""

    peer: int
    start: int
    end: int
    needs: int
    """How many of the rank's incoming messages have to be there, and added, before it can leave."""
    step: int


class Schedule(NamedTuple):
    """One rank's part in an all-reduce. Peers are places among those that take part, not ranks.

    Both are in the order of steps. Between two ranks messages keep their order, so one is told from another by it.
    """

    incoming: tuple[Incoming, ...]
    outgoing: tuple[Outgoing, ...]


def as_operation(
    algorithm: str, items: int, item_bytes: int, schedules: Sequence[Schedule], earliest_s: float
) -> Operation:
    """What the schedules of all ranks put on the wire together."""
    size, messages = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for rank, schedule in enumerate(schedules):
        for message in schedule.outgoing:
            size[rank, message.peer] += (message.end - message.start) * item_bytes
            messages[rank, message.peer] += 1
    transfers = tuple(Transfer(*pair, size[pair], messages[pair]) for pair in size)
    return Operation("all_reduce", algorithm, items * item_bytes, transfers, earliest_s)
