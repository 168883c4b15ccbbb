"""Paceline's own all-reduces: run the schedule of an algorithm; add received parts while later ones are in transit."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from paceline.comm.group import Comm
from paceline.comm.messages.typed import Message, irecv, isend
from paceline.plans.cuts import SEGMENT_KB
from paceline.plans.schedule import AllReduceAlgorithm, Incoming, Outgoing, Schedule

RECEIVES_AHEAD = 4
"""Receives of messages to be added that a rank posts before it needs them."""


class Scratch:
    """Memory for received parts that are still to be added. It is kept between calls, so no step allocates memory."""

    def __init__(self) -> None:
        self._memory: dict[object, Tensor] = {}

    def slots(self, like: Tensor, items: int) -> list[Tensor]:
        """Return `RECEIVES_AHEAD` buffers of at least `items` items, with the dtype and device of `like`."""
        key = like.dtype, like.device
        if key not in self._memory or self._memory[key].shape[1] < items:
            self._memory[key] = like.new_empty((RECEIVES_AHEAD, items))
        return list(self._memory[key].unbind())


def all_reduce(
    tensor: Tensor,
    comm: Comm,
    algorithm: AllReduceAlgorithm,
    ranks: Sequence[int] | None = None,
    *,
    segment_kb: float = SEGMENT_KB,
    scratch: Scratch | None = None,
) -> None:
    """Replace a one-dimensional contiguous tensor by its sum over the ranks, in place, bit-identical on all ranks.

    `ranks` are the participating ranks of `comm.group`; their order gives them their positions in the algorithm. Each
    of them must call this with a tensor of the same size; other ranks must not call it. Pass the same `scratch` to
    repeated calls to avoid allocating memory; each thread needs its own.
    """
    members = range(comm.world_size) if ranks is None else ranks
    position = members.index(comm.rank)
    schedule = algorithm.schedule(tensor.numel(), tensor.element_size(), position, len(members), segment_kb)
    _run_schedule(schedule, tensor, comm, members, scratch or Scratch())


def _run_schedule(schedule: Schedule, tensor: Tensor, comm: Comm, members: Sequence[int], scratch: Scratch) -> None:
    """Send and receive parts of a one-dimensional tensor; `members[i]` is the rank at position i of the schedule."""
    parts = [message.end - message.start for message in schedule.incoming if message.adds]
    slots = scratch.slots(tensor, max(parts, default=0))
    run = _run_step_by_step if comm.backend == "nccl" else _run_eagerly
    run(schedule, _Exchange(tensor, comm, members, slots))


class _Exchange:
    """Messages of one all-reduce that are in transit on this rank."""

    def __init__(self, tensor: Tensor, comm: Comm, members: Sequence[int], slots: list[Tensor]) -> None:
        self._tensor = tensor
        self._comm = comm
        self._members = members
        self._slots = slots
        self._receives: deque[tuple[Message, Tensor, Tensor | None]] = deque()
        self._sends: list[Message] = []
        self.posted_receives = 0

    def send(self, message: Outgoing) -> None:
        part = self._tensor[message.start : message.end]
        self._sends.append(isend(part, self._members[message.peer], self._comm))

    def post_receive(self, message: Incoming) -> None:
        """Start receiving a message: into a slot if it is to be added, else directly into the tensor.

        The part of the tensor that is overwritten may still be being sent when the receive is posted. It has been sent
        by the time the message arrives, because the message is computed from it.
        """
        part = self._tensor[message.start : message.end]
        slot = self._slots[self.posted_receives % RECEIVES_AHEAD][: len(part)] if message.adds else None
        self.posted_receives += 1
        receive = irecv(part if slot is None else slot, self._members[message.peer], self._comm)
        self._receives.append((receive, part, slot))

    def finish_receive(self) -> None:
        """Wait for the next message, and add it where it is to be added."""
        receive, part, slot = self._receives.popleft()
        receive.wait()
        if slot is not None:
            part.add_(slot)

    def send_all(self, messages: Sequence[Outgoing]) -> None:
        for message in messages:
            self.send(message)

    def is_below(self, peer: int) -> bool:
        """Return whether this rank is lower than the rank at position `peer`."""
        return self._comm.rank < self._members[peer]

    def finish_sends(self) -> None:
        """Wait until all messages have been sent."""
        for send in self._sends:
            send.wait()


def _run_eagerly(schedule: Schedule, exchange: _Exchange) -> None:
    """Send each message as soon as its input is complete. Receives are posted first, so that Gloo sends at once."""
    to_receive, to_send = deque(schedule.incoming), deque(schedule.outgoing)

    def post_receives(received: int) -> None:
        """Post as many receives as there are free slots. Messages that are not added come last and need no slot."""
        while to_receive and (not to_receive[0].adds or exchange.posted_receives < received + RECEIVES_AHEAD):
            exchange.post_receive(to_receive.popleft())

    def send_ready(received: int) -> None:
        while to_send and to_send[0].needs <= received:
            exchange.send(to_send.popleft())

    post_receives(0)
    send_ready(0)
    for received in range(1, len(schedule.incoming) + 1):
        exchange.finish_receive()
        send_ready(received)
        post_receives(received)
    exchange.finish_sends()


def _run_step_by_step(schedule: Schedule, exchange: _Exchange) -> None:
    """Run one step at a time, the lower rank of each pair sending first: NCCL runs a pair's messages one at a time."""
    receiving_steps = {message.step for message in schedule.incoming}
    for step in sorted(receiving_steps | {message.step for message in schedule.outgoing}):
        outgoing = [message for message in schedule.outgoing if message.step == step]
        incoming = [message for message in schedule.incoming if message.step == step]
        sends_first = any(exchange.is_below(message.peer) for message in outgoing)
        if sends_first:
            exchange.send_all(outgoing)
        for message in incoming:
            exchange.post_receive(message)
            exchange.finish_receive()
        if not sends_first:
            exchange.send_all(outgoing)
    exchange.finish_sends()
