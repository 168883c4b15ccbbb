"""Plan of `priority`: gradients in blocks, blocks in slices, one all-reduce per slice, first layers first."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import Any

from paceline.plans import operations
from paceline.plans.buckets import MIB
from paceline.plans.cuts import ItemRange, chunks
from paceline.plans.plan import Gradient, Operation, Plan

_BLOCKS_PER_SLICE = 4
"""Small layers share a block of up to about a quarter of a slice."""
_SMALL_PER_BLOCK = 16
"""A gradient of at most a sixteenth of a block is small, and may be appended to the block of the layer before it."""


def plan(gradients: Sequence[Gradient], ranks: int, *, slice_mb: float = 4.0, **_: Any) -> Plan:
    """Return one all-reduce per slice, ready when the last gradient of its block is ready.

    They are in the order of forward: of those that are ready, the first in this order starts.
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
    """Return the positions of the gradients in each block, in forward order; only gradients of one kind share a block.

    Small layers share a block, which is smaller than a slice, because forward cannot begin before the first block has
    arrived. A large gradient starts a new block, unless the block before is less than half full. Small gradients that
    follow it, such as a bias or the weights of a normalisation, are appended to its block, up to half a block.
    """
    limit = slice_bytes / _BLOCKS_PER_SLICE
    closed: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    filled_bytes, appended_bytes = dict[Hashable, int](), dict[Hashable, int]()
    for position, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        before, is_small = filled_bytes.get(kind, 0), _SMALL_PER_BLOCK * size <= limit
        is_appended = is_small and 2 * (appended_bytes.get(kind, 0) + size) <= limit
        if 2 * before >= limit and before + size > limit and not is_appended:
            closed.append(filling.pop(kind))
            before = 0
        filling.setdefault(kind, []).append(position)
        filled_bytes[kind] = before + size
        appended_bytes[kind] = appended_bytes.get(kind, 0) + size if is_small and before else 0
    return closed + list(filling.values())


def slices(items: int, item_bytes: int, slice_bytes: int) -> list[ItemRange]:
    """Return the parts of a block that are sent separately: of about the slice size, as even as possible."""
    return chunks(items, max(1, round(items * item_bytes / slice_bytes)))


def schedule(ready_s: Sequence[float], needed: Sequence[int], sizes: Sequence[int], s_per_byte: float) -> list[int]:
    """Return the order in which slices are sent: of those that are ready, the one that is needed first.

    Each slice has the time at which it is ready, its position in the order of need, and its bytes. While none is ready,
    nothing is sent.
    """
    by_ready_time = sorted(range(len(ready_s)), key=lambda number: (ready_s[number], needed[number], number))
    ready: list[tuple[int, int]] = []
    order, now_s, seen = list[int](), 0.0, 0
    while len(order) < len(by_ready_time):
        if not ready:
            now_s = max(now_s, ready_s[by_ready_time[seen]])
        while seen < len(by_ready_time) and ready_s[by_ready_time[seen]] <= now_s:
            heapq.heappush(ready, (needed[by_ready_time[seen]], by_ready_time[seen]))
            seen += 1
        _, number = heapq.heappop(ready)
        order.append(number)
        now_s += sizes[number] * s_per_byte
    return order
