"""The plans of the classic strategies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.plans import operations
from paceline.plans.plan import Gradient, Operation, Plan

MIB = 2**20
DEFAULT_BUCKET_MB = 25.0
"""DDP's own bucket size, at which (and at no other) it makes the first bucket 1 MiB."""


def nothing(gradients: Sequence[Gradient], ranks: int, **_: Any) -> Plan:  # noqa: ARG001  (every plan takes the same)
    """`single` and `none`: nothing is sent."""
    return Plan(())


def gather_scatter(gradients: Sequence[Gradient], ranks: int, **_: Any) -> Plan:
    """Per parameter a gather to rank 0 and a scatter from it."""
    return _through_rank_0(gradients, ranks, "gather", "scatter")


def p2p(gradients: Sequence[Gradient], ranks: int, **_: Any) -> Plan:
    """The transfers of `gather_scatter`, as single messages."""
    return _through_rank_0(gradients, ranks, "send", "send")


def allreduce(gradients: Sequence[Gradient], ranks: int, **_: Any) -> Plan:
    """Per parameter an all-reduce, after backward."""
    end = backward_end(gradients)
    return Plan(tuple(operations.all_reduce(g.items, g.item_bytes, ranks, end) for g in gradients if ranks > 1))


def ddp(gradients: Sequence[Gradient], ranks: int, *, bucket_mb: float = 25.0, overlap: bool = True, **_: Any) -> Plan:
    """Per bucket an all-reduce, started when the bucket's last gradient is ready (or after all of backward)."""
    end = backward_end(gradients)
    plan = [
        operations.all_reduce(
            sum(g.items for g in bucket),
            bucket[0].item_bytes,
            ranks,
            max(g.ready_s for g in bucket) if overlap else end,
        )
        for bucket in ddp_buckets(gradients, bucket_mb)
    ]
    return Plan(tuple(plan) if ranks > 1 else ())


def ddp_buckets(gradients: Sequence[Gradient], bucket_mb: float) -> list[list[Gradient]]:
    """DDP's buckets after it rebuilt them: in the order of backward, each closed once it is full."""
    limits = [MIB if bucket_mb == DEFAULT_BUCKET_MB else int(bucket_mb * MIB), int(bucket_mb * MIB)]
    buckets: list[list[Gradient]] = []
    current: list[Gradient] = []
    for gradient in sorted(reversed(gradients), key=lambda g: g.ready_s):
        current.append(gradient)
        if sum(g.bytes for g in current) >= limits[min(len(buckets), 1)]:
            buckets.append(current)
            current = []
    return buckets + ([current] if current else [])


def backward_end(gradients: Sequence[Gradient]) -> float:
    """When the last gradient is ready."""
    return max((g.ready_s for g in gradients), default=0.0)


def _through_rank_0(gradients: Sequence[Gradient], ranks: int, to_root: str, from_root: str) -> Plan:
    end, plan = backward_end(gradients), list[Operation]()
    for gradient in gradients if ranks > 1 else ():
        plan.append(operations.gather(gradient, ranks, end, kind=to_root))
        plan.append(operations.scatter(gradient, ranks, end, kind=from_root))
    return Plan(tuple(plan))
