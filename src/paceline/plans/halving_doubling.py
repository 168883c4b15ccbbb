"""Plan of `halving_doubling`: the parts of the tensor that each rank exchanges with each partner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from paceline.plans.cuts import SEGMENT_KB, ItemRange, chunks, segment_items, segments
from paceline.plans.plan import Gradient, Plan
from paceline.plans.schedule import Incoming, Outgoing, Schedule, packed_plan

ALGORITHM = "halving_doubling"


def plan(gradients: Sequence[Gradient], ranks: int, *, segment_kb: float = SEGMENT_KB, **_: Any) -> Plan:
    """Return one all-reduce per item size over all gradients of that size, after backward."""
    return packed_plan(ALGORITHM, schedule, gradients, ranks, segment_kb)


@lru_cache(maxsize=1024)
def schedule(items: int, item_bytes: int, position: int, count: int, segment_kb: float) -> Schedule:
    """Return the messages of the rank at `position` among `count` ranks.

    The first 2^k ranks run the algorithm; each of them ends the halving phase with the sum of one block. A rank beyond
    them first sends its whole tensor to the rank 2^k positions lower, and receives the result from it at the end.
    """
    power = count - folded(count)
    blocks = _Blocks(chunks(items, power), item_bytes, segment_kb)
    if position >= power:
        partner = position - power
        inputs, results = blocks.to_reduce(0, power, partner), blocks.gathered(0, power, partner)
        return Schedule(
            tuple(Incoming(partner, *span, adds=False, step=1) for span in results),
            tuple(Outgoing(partner, *span, needs=0, step=0) for span in inputs),
        )
    rank = _RankMessages()
    if position + power < count:
        rank.receive(position + power, blocks.to_reduce(0, power, position), adds=True)
    distance = power // 2
    while distance:
        partner = position ^ distance
        rank.send(partner, blocks.to_reduce(*_block_range(partner, distance), partner))
        rank.receive(partner, blocks.to_reduce(*_block_range(position, distance), position), adds=True)
        distance //= 2
    distance = 1
    while distance < power:
        partner = position ^ distance
        rank.send(partner, blocks.gathered(*_block_range(position, distance), position))
        rank.receive(partner, blocks.gathered(*_block_range(partner, distance), partner), adds=False)
        distance *= 2
    if position + power < count:
        rank.send(position + power, blocks.gathered(0, power, position))
    return Schedule(tuple(rank.incoming), tuple(rank.outgoing))


def folded(count: int) -> int:
    """Return the number of ranks beyond the largest power of two; each folds into one of the first ranks."""
    return count - (1 << (count.bit_length() - 1))


def _block_range(position: int, count: int) -> tuple[int, int]:
    """Return the first of the `count` blocks that a position is responsible for, and the block after the last."""
    first = position // count * count
    return first, first + count


class _Blocks:
    """Blocks of a tensor, and the messages that carry several of them: blocks that are sent on soonest come first."""

    def __init__(self, blocks: list[ItemRange], item_bytes: int, segment_kb: float) -> None:
        self._blocks = blocks
        self._item_bytes = item_bytes
        self._segment_kb = segment_kb

    def to_reduce(self, first: int, end: int, position: int) -> Iterator[ItemRange]:
        """Yield blocks for a position that sends half of them on in the next step: that half first."""
        if (whole := self._segments(first, end)) is not None:
            yield from whole
            return
        half = (end - first) // 2
        other = position ^ half
        yield from self.to_reduce(*_block_range(other, half), other)
        yield from self.to_reduce(*_block_range(position, half), position)

    def gathered(self, first: int, end: int, position: int) -> Iterator[ItemRange]:
        """Yield blocks from a position that received half of them in the step before: that half last."""
        if (whole := self._segments(first, end)) is not None:
            yield from whole
            return
        half = (end - first) // 2
        other = position ^ half
        yield from self.gathered(*_block_range(position, half), position)
        yield from self.gathered(*_block_range(other, half), other)

    def _segments(self, first: int, end: int) -> list[ItemRange] | None:
        """Return the messages of one block, or the one message that holds several; None if they do not fit."""
        span = self._blocks[first][0], self._blocks[end - 1][1]
        if end - first == 1 or span[1] - span[0] <= segment_items(self._item_bytes, self._segment_kb):
            return list(segments(span, self._item_bytes, self._segment_kb))
        return None


class _RankMessages:
    """Messages of one rank, collected step by step."""

    def __init__(self) -> None:
        self.incoming: list[Incoming] = []
        self.outgoing: list[Outgoing] = []
        self._step = 0

    def send(self, peer: int, spans: Iterator[ItemRange]) -> None:
        """Add messages to send; each needs the last incoming message that overlaps with it."""
        for start, end in spans:
            needs = max((n for n, m in enumerate(self.incoming, 1) if m.start < end and start < m.end), default=0)
            self.outgoing.append(Outgoing(peer, start, end, needs, self._step))

    def receive(self, peer: int, spans: Iterator[ItemRange], *, adds: bool) -> None:
        """Add messages to receive, and end the step."""
        self.incoming += [Incoming(peer, *span, adds=adds, step=self._step) for span in spans]
        self._step += 1
