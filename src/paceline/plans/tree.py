"""Plan of `tree`: a reduction along a binomial tree to rank 0, and a broadcast back along the same tree."""

from __future__ import annotations

from functools import lru_cache

from paceline.plans.cuts import segments
from paceline.plans.schedule import AllReduceAlgorithm, Incoming, Outgoing, Schedule


@lru_cache(maxsize=1024)
def schedule(items: int, item_bytes: int, position: int, count: int, segment_kb: float) -> Schedule:
    """Return the messages of the rank at `position` in a tree of `count` ranks.

    A rank sends a segment to its parent as soon as those of all its children have been added. It sends the sum of a
    segment to its children as soon as it has it. So segments follow each other up and down the tree. Step k of the
    reduction joins ranks that are 2^k apart; the broadcast runs the steps in reverse.
    """
    rounds = (count - 1).bit_length()
    parent_step = (position & -position).bit_length() - 1 if position else rounds
    parent = position - (1 << parent_step)
    children = {step: position + (1 << step) for step in range(parent_step) if position + (1 << step) < count}
    last_step = 2 * rounds - 1
    parts = list(segments((0, items), item_bytes, segment_kb))
    incoming, outgoing = list[Incoming](), list[Outgoing]()
    for start, end in parts:
        incoming += [Incoming(child, start, end, adds=True, step=step) for step, child in children.items()]
        if position:
            outgoing.append(Outgoing(parent, start, end, needs=len(incoming), step=parent_step))
    for number, (start, end) in enumerate(parts, start=1):
        needs = number * len(children)
        if position:
            incoming.append(Incoming(parent, start, end, adds=False, step=last_step - parent_step))
            needs = len(incoming)
        outgoing += [
            Outgoing(child, start, end, needs, step=last_step - step) for step, child in reversed(children.items())
        ]
    return Schedule(tuple(incoming), tuple(outgoing))


ALGORITHM = AllReduceAlgorithm("tree", schedule)
plan = ALGORITHM.plan
