"""Carries out an all-reduce that is written down as messages: adds what arrives while the next is on the wire."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from paceline.comm.group import Comm
from paceline.comm.messages import Message, irecv, isend
from paceline.plans.schedule import Incoming, Outgoing, Schedule

AHEAD = 4
"""Messages to be added that a rank is ready to receive before it needs them."""


class Scratch:
    """Memory for what arrives and has yet to be added; kept between calls, so that no step allocates any."""

    def __init__(self) -> None:
        self._memory: dict[object, Tensor] = {}

    def slots(self, like: Tensor, items: int) -> list[Tensor]:
        """Pieces of memory for the messages that are received ahead."""
        key = like.dtype, like.device
        if key not in self._memory or self._memory[key].shape[1] < items:
            self._memory[key] = like.new_empty((AHEAD, items))
        return list(self._memory[key].unbind())


def carry_out(schedule: Schedule, tensor: Tensor, comm: Comm, members: Sequence[int], scratch: Scratch) -> None:
    """Sends and receives parts of a one-dimensional tensor; `members` are the ranks of the schedule's places."""
    parts = [message.end - message.start for message in schedule.incoming if message.adds]
    slots = scratch.slots(tensor, max(parts, default=0))
    run = _in_turns if comm.backend == "nccl" else _as_they_come
    run(schedule, _Wire(tensor, comm, members, slots))


class _Wire:
    """Starts the messages of one all-reduce."""

    def __init__(self, tensor: Tensor, comm: Comm, members: Sequence[int], slots: list[Tensor]) -> None:
        self._tensor = tensor
        self._comm = comm
        self._members = members
        self._slots = slots
        self._arrivals: deque[tuple[Message, Tensor, Tensor | None]] = deque()
        self._departures: list[Message] = []
        self.received = 0

    def send(self, message: Outgoing) -> None:
        part = self._tensor[message.start : message.end]
        self._departures.append(isend(part, self._members[message.peer], self._comm))

    def receive(self, message: Incoming) -> None:
        """Gets ready for a message. What takes another's place is received there.

        That memory may be on its way out still, but not when the message comes: it is made of what was sent.
        """
        part = self._tensor[message.start : message.end]
        slot = self._slots[self.received % AHEAD][: len(part)] if message.adds else None
        self.received += 1
        arrival = irecv(part if slot is None else slot, self._members[message.peer], self._comm)
        self._arrivals.append((arrival, part, slot))

    def take(self) -> None:
        """Waits for the next message, and adds it."""
        arrival, part, slot = self._arrivals.popleft()
        arrival.wait()
        if slot is not None:
            part.add_(slot)

    def send_all(self, messages: Sequence[Outgoing]) -> None:
        for message in messages:
            self.send(message)

    def is_below(self, peer: int) -> bool:
        """Whether this rank is the lower one of two."""
        return self._comm.rank < self._members[peer]

    def drain(self) -> None:
        """Waits until all that was sent has left."""
        for departure in self._departures:
            departure.wait()


def _as_they_come(schedule: Schedule, wire: _Wire) -> None:
    """Every message leaves as soon as it can, and is awaited before it does: then Gloo sends it at once."""
    coming, waiting = deque(schedule.incoming), deque(schedule.outgoing)

    def get_ready(taken: int) -> None:
        """What is to be added needs a slot; the rest, which comes after it, is received where it belongs."""
        while coming and (not coming[0].adds or wire.received < taken + AHEAD):
            wire.receive(coming.popleft())

    def send_ready(taken: int) -> None:
        while waiting and waiting[0].needs <= taken:
            wire.send(waiting.popleft())

    get_ready(0)
    send_ready(0)
    for taken in range(1, len(schedule.incoming) + 1):
        wire.take()
        send_ready(taken)
        get_ready(taken)
    wire.drain()


def _in_turns(schedule: Schedule, wire: _Wire) -> None:
    """Of two partners the lower sends first, step by step: NCCL does what two ranks exchange one after the other."""
    received_in = {message.step for message in schedule.incoming}
    for step in sorted(received_in | {message.step for message in schedule.outgoing}):
        outgoing = [message for message in schedule.outgoing if message.step == step]
        incoming = [message for message in schedule.incoming if message.step == step]
        sends_first = any(wire.is_below(message.peer) for message in outgoing)
        if sends_first:
            wire.send_all(outgoing)
        for message in incoming:
            wire.receive(message)
            wire.take()
        if not sends_first:
            wire.send_all(outgoing)
    wire.drain()
