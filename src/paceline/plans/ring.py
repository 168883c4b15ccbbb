"""The plan of `ring`: who passes which segment to whom."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from paceline.plans.classic import backward_end
from paceline.plans.cuts import SEGMENT_KB, ItemRange, chunks, segments
from paceline.plans.plan import Gradient, Operation, Plan
from paceline.plans.schedule import Incoming, Outgoing, Schedule, as_operation


def plan(gradients: Sequence[Gradient], ranks: int, *, segment_kb: float = SEGMENT_KB, **_: Any) -> Plan:
    """After backward, an all-reduce of all gradients of one kind of number."""
    end = backward_end(gradients)
    packed = pack(gradients) if ranks > 1 else {}
    return Plan(tuple(all_reduce(items, each, ranks, segment_kb, end) for each, items in packed.items()))


def pack(gradients: Sequence[Gradient]) -> dict[int, int]:
    """The items that travel together, by the bytes of each."""
    packed: dict[int, int] = {}
    for gradient in gradients:
        packed[gradient.item_bytes] = packed.get(gradient.item_bytes, 0) + gradient.items
    return packed


def all_reduce(
    items: int, item_bytes: int, ranks: int, segment_kb: float = SEGMENT_KB, earliest_s: float = 0.0
) -> Operation:
    """One all-reduce around the ring."""
    schedules = [schedule(items, item_bytes, rank, ranks, segment_kb) for rank in range(ranks)]
    return as_operation("ring", items, item_bytes, schedules, earliest_s)


@lru_cache(maxsize=1024)
def schedule(items: int, item_bytes: int, place: int, places: int, segment_kb: float) -> Schedule:
    """What the one at a place of the ring sends to the next and receives from the one before.

    The tensor has a chunk for each place. In step t everyone sends the chunk t places back from its own, which is what
    it received in the step before: in the first n−1 steps sums that grow, in the others finished ones.
    """
    cut = chunks(items, places)
    steps = 2 * (places - 1)

    def spans(step: int) -> list[ItemRange]:
        return list(segments(cut[(place - step) % places], item_bytes, segment_kb))

    before, after = (place - 1) % places, (place + 1) % places
    incoming = [
        Incoming(before, *span, adds=step < places - 1, step=step) for step in range(steps) for span in spans(step + 1)
    ]
    outgoing = [(step, span) for step in range(steps) for span in spans(step)]
    own = len(spans(0))
    return Schedule(
        tuple(incoming),
        tuple(
            Outgoing(after, *span, needs=max(0, number - own + 1), step=step)
            for number, (step, span) in enumerate(outgoing)
        ),
    )
