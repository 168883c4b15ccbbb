"""Plan of `ring`: the segments that each rank sends to the next rank."""

from __future__ import annotations

from functools import lru_cache

from paceline.plans.cuts import ItemRange, chunks, segments
from paceline.plans.schedule import AllReduceAlgorithm, Incoming, Outgoing, Schedule


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


ALGORITHM = AllReduceAlgorithm("ring", schedule)
plan = ALGORITHM.plan
