"""Plan of `ring`: the segments that each rank sends to the next rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from paceline.plans.cuts import SEGMENT_KB, ItemRange, chunks, segments
from paceline.plans.plan import Gradient, Operation, Plan
from paceline.plans.schedule import Incoming, Outgoing, Schedule, all_reduce_operation, packed_plan


def plan(gradients: Sequence[Gradient], ranks: int, *, segment_kb: float = SEGMENT_KB, **_: Any) -> Plan:
    """Return one all-reduce per item size over all gradients of that size, after backward."""
    return packed_plan("ring", schedule, gradients, ranks, segment_kb)


def all_reduce(
    items: int, item_bytes: int, ranks: int, segment_kb: float = SEGMENT_KB, earliest_s: float = 0.0
) -> Operation:
    """Return one ring all-reduce."""
    return all_reduce_operation("ring", schedule, items, item_bytes, ranks, segment_kb, earliest_s)


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
