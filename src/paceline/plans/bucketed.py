"""Plan of `bucketed`: one all-reduce per bucket, while backward runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.plans.buckets import all_reduce_of, buckets_of
from paceline.plans.plan import Gradient, Plan


def plan(
    gradients: Sequence[Gradient], ranks: int, *, bucket_mb: float = 25.0, first_mb: float = 1.0, **_: Any
) -> Plan:
    """Return one all-reduce per bucket, started when the bucket's last gradient is ready."""
    buckets = buckets_of(gradients, first_mb, bucket_mb) if ranks > 1 else []
    return Plan(tuple(all_reduce_of(bucket, ranks) for bucket in buckets))
