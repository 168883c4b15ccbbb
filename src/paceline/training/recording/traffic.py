"""Planned traffic of each rank in one step, by the strategy's plan: gradients and broadcast buffers."""

from __future__ import annotations

import dataclasses

from paceline.config.specs import Spec
from paceline.plans import Gradient, Plan
from paceline.plans.operations import broadcast
from paceline.records.summary import PlannedTraffic
from paceline.strategies.registry import ENTRIES, plan_of
from paceline.training.sync import Sync


def planned_traffic(strategy: str, sync: Sync) -> PlannedTraffic | None:
    """Return bytes sent and received per rank and step, and bytes per link; None if a part of the traffic has no plan.

    That is the case for a user's strategy and for BatchNorm's messages under `--bn sync`.
    """
    if Spec.parse(strategy).name not in ENTRIES or sync.uses_sync_batchnorm:
        return None
    gradients = [Gradient(name, p.numel(), p.element_size()) for name, p in sync.strategy.parameters]
    plan = plan_of(strategy)(gradients, sync.ranks, hosts=sync.comm.hosts, **dataclasses.asdict(sync.strategy.options))
    step_plan = plan + Plan(tuple(broadcast(size, sync.ranks) for size in sync.broadcast_bytes))
    # If parameters may be unused, each step may use others, and ranks exchange which ones in extra messages.
    # If ranks do not step together, some send more often than others.
    exact = not sync.strategy.allow_unused and sync.strategy.lockstep
    all_ranks = range(sync.ranks + sync.comm.servers)
    return PlannedTraffic(
        sent_bytes=[step_plan.sent_bytes(rank) for rank in all_ranks],
        received_bytes=[step_plan.received_bytes(rank) for rank in all_ranks],
        operations=len(step_plan.operations),
        algorithms=sorted({operation.algorithm for operation in plan.operations}),
        buffer_bytes=sum(sync.broadcast_bytes),
        links=step_plan.links() if exact else None,
    )
