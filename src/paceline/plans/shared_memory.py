"""Plan of `shared_memory`: no messages inside a host, a ring all-reduce of the leaders between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paceline.plans.buckets import buckets_of
from paceline.plans.plan import Gradient, Operation, Plan
from paceline.plans.ring import ALGORITHM as RING


def plan(
    gradients: Sequence[Gradient],
    ranks: int,
    *,
    hosts: Sequence[Sequence[int]] = (),
    bucket_mb: float = 1.0,
    first_mb: float = 0.25,
    **_: Any,
) -> Plan:
    """Return one ring all-reduce of the leaders per bucket, started when the bucket's last gradient is ready.

    Without `hosts`, all ranks are on one host and nothing is sent.
    """
    leaders = [host[0] for host in hosts] or [0]
    buckets = buckets_of(gradients, first_mb, bucket_mb) if ranks > 1 else []
    return Plan(tuple(_all_reduce(bucket, leaders) for bucket in buckets))


def _all_reduce(bucket: Sequence[Gradient], leaders: Sequence[int]) -> Operation:
    items, ready_s = sum(gradient.items for gradient in bucket), max(gradient.ready_s for gradient in bucket)
    ring = RING.all_reduce(items, bucket[0].item_bytes, len(leaders), earliest_s=ready_s)
    moved = (replace(t, source=leaders[t.source], target=leaders[t.target]) for t in ring.transfers)
    return replace(ring, algorithm="memory" if len(leaders) == 1 else "memory, ring", transfers=tuple(moved))
