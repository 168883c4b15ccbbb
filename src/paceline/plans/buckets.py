"""Assignment of gradients to buckets: in the order of backward, each bucket closed once it is full."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from paceline.plans import operations
from paceline.plans.plan import Gradient, Operation

MIB = 2**20


def assign_buckets(
    sizes: Sequence[int], kinds: Sequence[Hashable], first_bytes: int, bucket_bytes: int
) -> list[list[int]]:
    """Return the positions of the gradients in each bucket; only gradients of one kind share a bucket.

    The first bucket of each kind has a separate limit: a small first bucket is sent early. Gradients are not split, so
    a bucket may exceed its limit by less than the size of its last gradient.
    """
    full: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    room_bytes: dict[Hashable, int] = {}
    for position, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        filling.setdefault(kind, []).append(position)
        room_bytes[kind] = room_bytes.get(kind, first_bytes) - size
        if room_bytes[kind] <= 0:
            full.append(filling.pop(kind))
            room_bytes[kind] = bucket_bytes
    return full + list(filling.values())


def buckets_of(gradients: Sequence[Gradient], first_mb: float, bucket_mb: float) -> list[list[Gradient]]:
    """Return the buckets of a model, filled in the order in which backward computes the gradients."""
    # Without measured times, backward is assumed to go from the last gradient to the first.
    in_order = sorted(reversed(gradients), key=lambda gradient: gradient.ready_s)
    sizes, kinds = [g.bytes for g in in_order], [g.item_bytes for g in in_order]
    packed = assign_buckets(sizes, kinds, int(first_mb * MIB), int(bucket_mb * MIB))
    return [[in_order[position] for position in bucket] for bucket in packed]


def all_reduce_of(bucket: Sequence[Gradient], ranks: int, earliest_s: float | None = None) -> Operation:
    """Return a bucket's all-reduce, started when its last gradient is ready, or at a given time."""
    ready_s = max(gradient.ready_s for gradient in bucket)
    items = sum(gradient.items for gradient in bucket)
    return operations.all_reduce(items, bucket[0].item_bytes, ranks, ready_s if earliest_s is None else earliest_s)
