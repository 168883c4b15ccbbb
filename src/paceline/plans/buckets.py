"""How gradients are packed into buckets: in the order of backward, each bucket closed once it is full."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from paceline.plans import operations
from paceline.plans.plan import Gradient, Operation

MIB = 2**20


def cut(sizes: Sequence[int], kinds: Sequence[Hashable], first_bytes: int, bucket_bytes: int) -> list[list[int]]:
    """The positions that each bucket holds; only gradients of one kind share a bucket.

    The first bucket of each kind is closed at a limit of its own: made small, it sets out early. A gradient is never
    cut, so a bucket may pass its limit by less than its last gradient.
    """
    full: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    room: dict[Hashable, int] = {}
    for position, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        filling.setdefault(kind, []).append(position)
        room[kind] = room.get(kind, first_bytes) - size
        if room[kind] <= 0:
            full.append(filling.pop(kind))
            room[kind] = bucket_bytes
    return full + list(filling.values())


def buckets_of(gradients: Sequence[Gradient], first_mb: float, bucket_mb: float) -> list[list[Gradient]]:
    """The buckets of a model, filled in the order in which backward has its gradients."""
    # Where nothing is known of backward, it goes from the last one to the first.
    in_order = sorted(reversed(gradients), key=lambda gradient: gradient.ready_s)
    sizes, kinds = [g.bytes for g in in_order], [g.item_bytes for g in in_order]
    packed = cut(sizes, kinds, int(first_mb * MIB), int(bucket_mb * MIB))
    return [[in_order[position] for position in bucket] for bucket in packed]


def all_reduce_of(bucket: Sequence[Gradient], ranks: int, earliest_s: float | None = None) -> Operation:
    """A bucket's all-reduce, started when its last gradient is ready, or at a given time."""
    ready_s = max(gradient.ready_s for gradient in bucket)
    items = sum(gradient.items for gradient in bucket)
    return operations.all_reduce(items, bucket[0].item_bytes, ranks, ready_s if earliest_s is None else earliest_s)
