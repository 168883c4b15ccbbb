"""How a tensor is cut: into chunks, one for each rank, and these into segments, each of which is one message."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

SEGMENT_KB = 2048.0
"""KiB of a segment, unless told otherwise: on one host smaller ones cost more in messages than they gain by overlap."""

ItemRange = tuple[int, int]
"""The first item, and the one behind the last."""


def chunks(items: int, parts: int) -> list[ItemRange]:
    """Parts that follow each other, as even as whole items allow: the first ones may have an item more."""
    each, more = divmod(items, parts)
    starts = [part * each + min(part, more) for part in range(parts + 1)]
    return list(pairwise(starts))


def segments(chunk: ItemRange, item_bytes: int, segment_kb: float) -> Iterator[ItemRange]:
    """The messages of a chunk, all as large as they may be but for the last; none of them is empty."""
    items = segment_items(item_bytes, segment_kb)
    for start in range(chunk[0], chunk[1], items):
        yield start, min(start + items, chunk[1])


def segment_items(item_bytes: int, segment_kb: float) -> int:
    """The items of a segment: one at least."""
    return max(1, int(segment_kb * 1024) // item_bytes)
