"""Plans of the classic strategies, and of those whose ranks send nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.plans import operations
from paceline.plans.buckets import all_reduce_of, buckets_of
from paceline.plans.plan import Gradient, Operation, Plan, backward_end

DEFAULT_BUCKET_MB = 25.0
"""DDP's default bucket size. Only with this size does DDP limit the first bucket to 1 MiB."""


def nothing(gradients: Sequence[Gradient], ranks: int, **_: Any) -> Plan:  # noqa: ARG001  (same parameters as all plans)
    """Return the empty plan of strategies whose ranks send nothing."""
    return Plan(())


def gather_scatter(gradients: Sequence[Gradient], ranks: int, **_: Any) -> Plan:
    """Return a gather to rank 0 and a scatter from it, per parameter."""
    return _through_rank_0(gradients, ranks, "gather", "scatter")


def p2p(gradients: Sequence[Gradient], ranks: int, **_: Any) -> Plan:
    """Return the transfers of `gather_scatter` as point-to-point messages."""
    return _through_rank_0(gradients, ranks, "send", "send")


def allreduce(gradients: Sequence[Gradient], ranks: int, **_: Any) -> Plan:
    """Return one all-reduce per parameter, after backward."""
    end = backward_end(gradients)
    return Plan(tuple(operations.all_reduce(g.items, g.item_bytes, ranks, end) for g in gradients if ranks > 1))


def ddp(gradients: Sequence[Gradient], ranks: int, *, bucket_mb: float = 25.0, overlap: bool = True, **_: Any) -> Plan:
    """Return one all-reduce per bucket, started when its last gradient is ready; without `overlap`, after backward."""
    earliest_s = None if overlap else backward_end(gradients)
    buckets = ddp_buckets(gradients, bucket_mb) if ranks > 1 else []
    return Plan(tuple(all_reduce_of(bucket, ranks, earliest_s) for bucket in buckets))


def ddp_buckets(gradients: Sequence[Gradient], bucket_mb: float) -> list[list[Gradient]]:
    """Return DDP's buckets after its first step, when it has rebuilt them in the order of backward."""
    first_mb = 1.0 if bucket_mb == DEFAULT_BUCKET_MB else bucket_mb
    return buckets_of(gradients, first_mb, bucket_mb)


def _through_rank_0(gradients: Sequence[Gradient], ranks: int, to_root: str, from_root: str) -> Plan:
    end, plan = backward_end(gradients), list[Operation]()
    for gradient in gradients if ranks > 1 else ():
        plan.append(operations.gather(gradient, ranks, end, kind=to_root))
        plan.append(operations.scatter(gradient, ranks, end, kind=from_root))
    return Plan(tuple(plan))
