"""The plan of `priority`: gradients in blocks, blocks in slices, an all-reduce per slice, the first layers' first."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import Any

from paceline.plans import operations
from paceline.plans.buckets import MIB
from paceline.plans.cuts import ItemRange, chunks
from paceline.plans.plan import Gradient, Operation, Plan

_BLOCK, _SMALL = 4, 16
"""Layers share a block of about a quarter of a slice; a gradient of less than a sixteenth of that rides along."""


def plan(gradients: Sequence[Gradient], ranks: int, *, slice_mb: float = 4.0, **_: Any) -> Plan:
    """An all-reduce per slice, which may start when the block that it is cut from has its last gradient.

    They stand in the order of forward: of those that may start, the first of them does.
    """
    slice_bytes = int(slice_mb * MIB)
    sizes, kinds = [gradient.bytes for gradient in gradients], [gradient.item_bytes for gradient in gradients]
    found = list[Operation]()
    for block in blocks(sizes, kinds, slice_bytes) if ranks > 1 else []:
        members = [gradients[position] for position in block]
        ready_s, item_bytes = max(gradient.ready_s for gradient in members), members[0].item_bytes
        for start, end in slices(sum(gradient.items for gradient in members), item_bytes, slice_bytes):
            found.append(operations.all_reduce(end - start, item_bytes, ranks, ready_s))
    return Plan(tuple(found))


def blocks(sizes: Sequence[int], kinds: Sequence[Hashable], slice_bytes: int) -> list[list[int]]:
    """The positions that each block holds, in the order of forward; only gradients of one kind share a block.

    Small ones share a block, which is less than a slice: forward cannot begin before it has the first. A large one
    begins a block of its own, unless that before it is not half full; small ones that follow it, a bias or the weights
    of a normalisation, ride with it, up to half a block.
    """
    limit = slice_bytes / _BLOCK
    closed: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    held, riding = dict[Hashable, int](), dict[Hashable, int]()
    for position, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        before, is_small = held.get(kind, 0), _SMALL * size <= limit
        rides = is_small and 2 * (riding.get(kind, 0) + size) <= limit
        if 2 * before >= limit and before + size > limit and not rides:
            closed.append(filling.pop(kind))
            before = 0
        filling.setdefault(kind, []).append(position)
        held[kind] = before + size
        riding[kind] = riding.get(kind, 0) + size if is_small and before else 0
    return closed + list(filling.values())


def slices(items: int, item_bytes: int, slice_bytes: int) -> list[ItemRange]:
    """The parts of a block that travel by themselves: as even as can be, each of about a slice."""
    return chunks(items, max(1, round(items * item_bytes / slice_bytes)))


def schedule(ready_s: Sequence[float], needed: Sequence[int], sizes: Sequence[int], s_per_byte: float) -> list[int]:
    """The order in which slices go one after the other: of those that are ready, the one that is needed first.

    Each slice has the moment at which it is ready, its place in the order of need, and its bytes. Where none is ready,
    the wire waits for the next one to be.
    """
    coming = sorted(range(len(ready_s)), key=lambda number: (ready_s[number], needed[number], number))
    waiting: list[tuple[int, int]] = []
    order, now_s, came = list[int](), 0.0, 0
    while len(order) < len(coming):
        if not waiting:
            now_s = max(now_s, ready_s[coming[came]])
        while came < len(coming) and ready_s[coming[came]] <= now_s:
            heapq.heappush(waiting, (needed[coming[came]], coming[came]))
            came += 1
        _, number = heapq.heappop(waiting)
        order.append(number)
        now_s += sizes[number] * s_per_byte
    return order
