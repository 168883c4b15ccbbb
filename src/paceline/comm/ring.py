"""All-reduce around a ring, on messages between neighbours: first sums go round, then results."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from torch import Tensor

from paceline.comm.group import Comm
from paceline.comm.messages import Message, irecv, isend
from paceline.plans.cuts import SEGMENT_KB, Span, chunks, segment_items, segments

AHEAD = 4
"""Messages that a rank is ready to receive before it needs them."""


class Scratch:
    """Memory for what arrives and has yet to be added; kept between calls, so that none is allocated in a step."""

    def __init__(self) -> None:
        self._memory: dict[object, list[Tensor]] = {}

    def slots(self, like: Tensor, items: int) -> list[Tensor]:
        """As many pieces of memory as messages are received ahead."""
        key = (like.dtype, like.device, items)
        if key not in self._memory:
            self._memory = {key: list(like.new_empty((AHEAD, items)).unbind())}
        return self._memory[key]


def ring_all_reduce(
    tensor: Tensor,
    comm: Comm,
    ranks: Sequence[int] | None = None,
    *,
    segment_kb: float = SEGMENT_KB,
    scratch: Scratch | None = None,
) -> None:
    """Replaces a one-dimensional contiguous tensor by its sum over the ranks, in place, bit-identical on all of them.

    `ranks` are the members of `comm.group` that take part, in the order of the ring; all of them call it with tensors
    of one size, the others do not. Whoever calls it often brings `scratch` along.
    """
    members = list(range(comm.world_size)) if ranks is None else list(ranks)
    if len(members) == 1 or tensor.numel() == 0:
        return
    place = members.index(comm.rank)
    before, after = members[place - 1], members[(place + 1) % len(members)]
    steps = 2 * (len(members) - 1)
    cut = chunks(tensor.numel(), len(members))

    def spans(step: int) -> Iterator[Span]:
        """What is sent in a step; the rank before sends it in the step before."""
        return segments(cut[(place - step) % len(members)], tensor.element_size(), segment_kb)

    items = segment_items(tensor.element_size(), segment_kb)
    slots = (scratch or Scratch()).slots(tensor, min(items, cut[0][1]))
    incoming = [(step < len(members), span) for step in range(1, steps + 1) for span in spans(step)]
    arrivals: deque[Message] = deque()
    departures: list[Message] = []

    def receive(number: int) -> None:
        if number < len(incoming):
            adds, (start, end) = incoming[number]
            target = slots[number % AHEAD][: end - start] if adds else tensor[start:end]
            arrivals.append(irecv(target, before, comm))

    for number in range(AHEAD):
        receive(number)
    for start, end in spans(0):
        departures.append(isend(tensor[start:end], after, comm))
    last = len(incoming) - len(list(spans(steps)))
    for number, (adds, (start, end)) in enumerate(incoming):
        arrivals.popleft().wait()
        if adds:
            tensor[start:end] += slots[number % AHEAD][: end - start]
        if number < last:
            departures.append(isend(tensor[start:end], after, comm))
        receive(number + AHEAD)
    for departure in departures:
        departure.wait()
