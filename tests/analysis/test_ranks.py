"""Hub ranks in the plans of real strategies."""

from __future__ import annotations

import pytest

from paceline.analysis.ranks import hub_rank
from paceline.plans import Gradient, Plan
from paceline.plans.classic import allreduce, gather_scatter, p2p
from paceline.plans.operations import broadcast
from paceline.plans.parameter_server import plan as parameter_server
from paceline.plans.ring import plan as ring

GRADIENTS = [Gradient("a", 6000), Gradient("b", 4000)]
BUFFERS = Plan((broadcast(40, 4),))


@pytest.mark.parametrize(
    ("plan", "ranks", "hub"),
    [
        (gather_scatter(GRADIENTS, 4), 4, 0),
        (gather_scatter(GRADIENTS, 4) + BUFFERS, 4, 0),
        (p2p(GRADIENTS, 3), 3, 0),
        (p2p(GRADIENTS, 2), 2, None),
        (parameter_server(GRADIENTS, 4), 4, 0),
        (parameter_server(GRADIENTS, 4, servers=2), 4, None),
        (parameter_server(GRADIENTS, 3, extra=True), 4, 3),
        (allreduce(GRADIENTS, 4), 4, None),
        (ring(GRADIENTS, 4), 4, None),
        (Plan(()), 4, None),
    ],
)
def test_the_rank_of_all_transfers_is_the_hub(plan: Plan, ranks: int, hub: int | None) -> None:
    moved = [[of(rank) for rank in range(ranks)] for of in (plan.sent_bytes, plan.received_bytes)]
    assert hub_rank(*moved) == hub
