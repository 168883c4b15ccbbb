"""Plan of `ring`: the segments that each rank sends to the next rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from paceline.plans.classic import backward_end
from paceline.plans.cuts import SEGMENT_KB, ItemRange, chunks, segments
from paceline.plans.plan import Gradient, Operation, Plan
from paceline.plans.schedule import Incoming, Outgoing, Schedule, operation_of


def plan(gradients: Sequence[Gradient], ranks: int, *, segment_kb: float = SEGMENT_KB, **_: Any) -> Plan:
    """Return one all-reduce per item size over all gradients of that size, after backward."""
    end = backward_end(gradients)
    packed = pack(gradients) if ranks > 1 else {}
    return Plan(tuple(all_reduce(items, each, ranks, segment_kb, end) for each, items in packed.items()))


def pack(gradients: Sequence[Gradient]) -> dict[int, int]:
    """Return the number of items that are sent together, by item size in bytes."""
    packed: dict[int, int] = {}
    for gradient in gradients:
        packed[gradient.item_bytes] = packed.get(gradient.item_bytes, 0) + gradient.items
    return packed


def all_reduce(
    items: int, item_bytes: int, ranks: int, segment_kb: float = SEGMENT_KB, earliest_s: float = 0.0
) -> Operation:
    """Return one ring all-reduce."""
    schedules = [schedule(items, item_bytes, rank, ranks, segment_kb) for rank in range(ranks)]
    return operation_of("ring", items, item_bytes, schedules, earliest_s)


@lru_cache(maxsize=1024)
def schedule(items: int, item_bytes: int, position: int, count: int, segment_kb: float) -> Schedule:
    """Return the messages of the rank at `position` in a ring of `count`: to the next rank, and from the one before.

    The tensor has one chunk per position. In step t each rank sends the chunk t positions before its own, which it
    received in step t−1: partial sums in the first n−1 steps, complete sums in the others.
    """
    parts = chunks(items, count)
    steps = 2 * (count - 1)

    def spans(step: int) -> list[ItemRange]:
        return list(segments(parts[(position - step) % count], item_bytes, segment_kb))

    before, after = (position - 1) % count, (position + 1) % count
    incoming = [
        Incoming(before, *span, adds=step < count - 1, step=step) for step in range(steps) for span in spans(step + 1)
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
