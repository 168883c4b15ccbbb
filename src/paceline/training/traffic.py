"""What each rank puts on the wire in one step, by the strategy's plan: gradients and broadcast buffers."""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.plans import Gradient, Plan
from paceline.plans.operations import broadcast
from paceline.specs import Spec
from paceline.strategies.registry import ENTRIES, plan_of
from paceline.training.sync import Sync


def planned_traffic(strategy: str, sync: Sync) -> dict[str, Any] | None:
    """Bytes sent and received per rank and step; None where some of it is not planned.

    That is a strategy of the user's own, which has no plan, and BatchNorm's own messages under `--bn sync`.
    """
    if Spec.parse(strategy).name not in ENTRIES or sync.normalises_together:
        return None
    gradients = [Gradient(name, p.numel(), p.element_size()) for name, p in sync.strategy.parameters]
    plan = plan_of(strategy)(gradients, sync.ranks, **dataclasses.asdict(sync.strategy.options))
    buffers = Plan((broadcast(sync.broadcast_bytes, sync.ranks),) if sync.broadcast_bytes else ())
    whole = plan + buffers
    return {
        "links": [dataclasses.asdict(link) for link in whole.links()],
        "sent_bytes": [whole.sent_bytes(rank) for rank in range(sync.ranks)],
        "received_bytes": [whole.received_bytes(rank) for rank in range(sync.ranks)],
        "operations": len(whole.operations),
        "buffer_bytes": sync.broadcast_bytes,
    }
