"""The plan of `halving_doubling`: which part of the tensor goes to which partner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from paceline.plans.classic import backward_end
from paceline.plans.cuts import SEGMENT_KB, ItemRange, chunks, segment_items, segments
from paceline.plans.plan import Gradient, Operation, Plan
from paceline.plans.ring import pack
from paceline.plans.schedule import Incoming, Outgoing, Schedule, as_operation


def plan(gradients: Sequence[Gradient], ranks: int, *, segment_kb: float = SEGMENT_KB, **_: Any) -> Plan:
    """After backward, an all-reduce of all gradients of one kind of number."""
    end = backward_end(gradients)
    packed = pack(gradients) if ranks > 1 else {}
    return Plan(tuple(all_reduce(items, each, ranks, segment_kb, end) for each, items in packed.items()))


def all_reduce(
    items: int, item_bytes: int, ranks: int, segment_kb: float = SEGMENT_KB, earliest_s: float = 0.0
) -> Operation:
    """One all-reduce by halving and doubling."""
    schedules = [schedule(items, item_bytes, rank, ranks, segment_kb) for rank in range(ranks)]
    return as_operation("halving_doubling", items, item_bytes, schedules, earliest_s)


@lru_cache(maxsize=1024)
def schedule(items: int, item_bytes: int, place: int, places: int, segment_kb: float) -> Schedule:
    """What the one at a place sends and receives.

    The first 2^k places take part, each of which ends up with the sum of one block; those beyond them first give all
    they have to the one that is 2^k places lower, and get the result from it in the end.
    """
    power = places - folded(places)
    blocks = _Blocks(chunks(items, power), item_bytes, segment_kb)
    if place >= power:
        host = place - power
        handed_in, handed_out = blocks.to_be_reduced(0, power, host), blocks.gathered(0, power, host)
        return Schedule(
            tuple(Incoming(host, *span, adds=False, step=1) for span in handed_out),
            tuple(Outgoing(host, *span, needs=0, step=0) for span in handed_in),
        )
    rank = _Rank()
    if place + power < places:
        rank.receive(place + power, blocks.to_be_reduced(0, power, place), adds=True)
    distance = power // 2
    while distance:
        partner = place ^ distance
        rank.send(partner, blocks.to_be_reduced(*_around(partner, distance), partner))
        rank.receive(partner, blocks.to_be_reduced(*_around(place, distance), place), adds=True)
        distance //= 2
    distance = 1
    while distance < power:
        partner = place ^ distance
        rank.send(partner, blocks.gathered(*_around(place, distance), place))
        rank.receive(partner, blocks.gathered(*_around(partner, distance), partner), adds=False)
        distance *= 2
    if place + power < places:
        rank.send(place + power, blocks.gathered(0, power, place))
    return Schedule(tuple(rank.incoming), tuple(rank.outgoing))


def folded(places: int) -> int:
    """How many are beyond the largest power of two, and so fold into as many partners: the first ones."""
    return places - (1 << (places.bit_length() - 1))


def _around(place: int, count: int) -> tuple[int, int]:
    """The first of as many blocks that a place is responsible for, and the one behind the last."""
    first = place // count * count
    return first, first + count


class _Blocks:
    """Blocks of a tensor, and in which messages several of them travel: what goes on soonest comes first."""

    def __init__(self, blocks: list[ItemRange], item_bytes: int, segment_kb: float) -> None:
        self._blocks = blocks
        self._item_bytes = item_bytes
        self._segment_kb = segment_kb

    def to_be_reduced(self, first: int, end: int, place: int) -> Iterator[ItemRange]:
        """Blocks on their way to a place, which sends half of them on in the next step: that half first."""
        if (whole := self._in_few(first, end)) is not None:
            yield from whole
            return
        half = (end - first) // 2
        other = place ^ half
        yield from self.to_be_reduced(*_around(other, half), other)
        yield from self.to_be_reduced(*_around(place, half), place)

    def gathered(self, first: int, end: int, place: int) -> Iterator[ItemRange]:
        """Blocks on their way from a place, the other half of which it received in the step before: that half last."""
        if (whole := self._in_few(first, end)) is not None:
            yield from whole
            return
        half = (end - first) // 2
        other = place ^ half
        yield from self.gathered(*_around(place, half), place)
        yield from self.gathered(*_around(other, half), other)

    def _in_few(self, first: int, end: int) -> list[ItemRange] | None:
        """The messages of one block, or the one of several that fit into it."""
        span = self._blocks[first][0], self._blocks[end - 1][1]
        if end - first == 1 or span[1] - span[0] <= segment_items(self._item_bytes, self._segment_kb):
            return list(segments(span, self._item_bytes, self._segment_kb))
        return None


class _Rank:
    """Collects the messages of one rank, step by step."""

    def __init__(self) -> None:
        self.incoming: list[Incoming] = []
        self.outgoing: list[Outgoing] = []
        self._step = 0

    def send(self, peer: int, spans: Iterator[ItemRange]) -> None:
        """Each leaves as soon as the last message that holds a part of it is there."""
        for start, end in spans:
            needs = max((n for n, m in enumerate(self.incoming, 1) if m.start < end and start < m.end), default=0)
            self.outgoing.append(Outgoing(peer, start, end, needs, self._step))

    def receive(self, peer: int, spans: Iterator[ItemRange], *, adds: bool) -> None:
        """Ends a step."""
        self.incoming += [Incoming(peer, *span, adds=adds, step=self._step) for span in spans]
        self._step += 1
