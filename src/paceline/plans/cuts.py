"""Division of a tensor into chunks, one per rank, and of chunks into segments, one per message."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

SEGMENT_KB = 2048.0
"""Default segment size in KiB. On one host, smaller segments cost more in messages than overlap gains."""

ItemRange = tuple[int, int]
"""Index of the first item, and of the item after the last."""


def chunks(items: int, parts: int) -> list[ItemRange]:
    """Return consecutive parts, as even as whole items allow: the first ones may have one more item."""
    each, remainder = divmod(items, parts)
    starts = [part * each + min(part, remainder) for part in range(parts + 1)]
    return list(pairwise(starts))


def segments(chunk: ItemRange, item_bytes: int, segment_kb: float) -> Iterator[ItemRange]:
    """Yield the segments of a chunk: all of the maximum size except the last, none of them empty."""
    items = segment_items(item_bytes, segment_kb)
    for start in range(chunk[0], chunk[1], items):
        yield start, min(start + items, chunk[1])


def segment_items(item_bytes: int, segment_kb: float) -> int:
    """Return the number of items in a segment, at least 1."""
    return max(1, int(segment_kb * 1024) // item_bytes)
