"""Tests of planned traffic for every strategy: the kernel's byte counts in real steps equal plan and framing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.analysis.traffic.payload import TOLERANCE
from paceline.comm import Comm
from paceline.comm.messages.payload import PayloadCount
from paceline.records.summary import PairTraffic, SocketLink
from paceline.strategies.registry import create
from paceline.training.recording.traffic import planned_traffic
from paceline.training.sync import Sync
from paceline.workloads.models import MODELS
from ranks import Pool
from registered import ON_CPUS

pytestmark = pytest.mark.takes(10)

STRATEGIES = [
    *ON_CPUS,
    "ddp:bucket_mb=1",
    "ddp:bucket_mb=0.02",
    "ddp:overlap=false",
    "ddp:bucket_view=true",
    "ddp:static_graph=true",
    "parameter_server:servers=2",
]
WARM_UP, COUNTED = 3, 2
Links = dict[tuple[int, int], float]


def with_batch_norm(dtype: torch.dtype) -> nn.Module:
    """Return small layers, whose framing matters, a large one, and buffers that are broadcast."""
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(128, 1500), nn.ReLU(), nn.Linear(1500, 10))
    return model.to(dtype)


class TwoTypes(nn.Module):
    """Model with buffers of two dtypes, which share one message."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = with_batch_norm(dtype)
        self.register_buffer("steps", torch.zeros(300, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        self.steps += 1
        return self.inner(x)


def models(dtype: torch.dtype) -> dict[str, nn.Module]:
    return {
        "cnn": MODELS["cnn"]((3, 32, 32), 10).to(dtype),
        "batch norm": with_batch_norm(dtype),
        "two types": TwoTypes(dtype),
        "tiny": tiny().to(dtype),
    }


def tiny() -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10))


def train_and_count(comm: Comm, strategy: str, dtype: torch.dtype = torch.float32) -> dict[str, tuple[Links, Links]]:
    """Return the bytes that a step of each model sends from rank to rank, and the planned bytes."""
    return {name: _count(comm, strategy, model) for name, model in models(dtype).items()}


def _count(comm: Comm, strategy: str, model: nn.Module) -> tuple[Links, Links]:
    sync = Sync(
        model, lambda named: torch.optim.SGD([p for _, p in named], lr=0.1), create(strategy), comm, "broadcast"
    )
    payload = PayloadCount(comm)
    for steps, counts in ((WARM_UP, False), (COUNTED, True)):
        for _ in range(steps):
            x = torch.randn(2, 3, 32, 32, dtype=next(model.parameters()).dtype)
            F.cross_entropy(sync.model(x), torch.zeros(2, dtype=torch.int64)).backward()
            sync.step()
        sync.strategy.finish()
        comm.control.barrier()
        payload.close_window(steps, counts=counts)
    counted, planned = payload.result(), planned_traffic(strategy, sync)
    sync.detach()
    assert counted is not None
    assert planned is not None
    assert planned.links is not None
    return _by_pair(counted.links, "received_bytes", by=COUNTED), _by_pair(
        planned.links, "payload_bytes", "framing_bytes"
    )


def _by_pair(links: Sequence[SocketLink | PairTraffic], *names: str, by: int = 1) -> Links:
    sizes = {(link.source, link.target): sum(getattr(link, name) for name in names) / by for link in links}
    return {pair: size for pair, size in sizes.items() if size}


def strategies_and_ranks() -> Iterator[Any]:
    """Yield each strategy on 2 and 4 ranks, a variant with options on one number of ranks; on the others in the soak.

    On 3 ranks, `comm/test_payload.py` counts the bytes of every strategy between emulated hosts.
    """
    for number, strategy in enumerate(STRATEGIES):
        for ranks in (2, 3, 4):
            now = ranks == 2 + number % 3 if ":" in strategy else ranks != 3
            yield pytest.param(strategy, ranks, marks=() if now else pytest.mark.soak)


@pytest.mark.parametrize(("strategy", "ranks"), list(strategies_and_ranks()))
def test_sockets_carry_what_the_plan_says(pool: Pool, strategy: str, ranks: int) -> None:
    active = len([role for role in create(strategy).roles(ranks) if role.name != "IDLE"])
    for name, (counted, planned) in pool.run(train_and_count, active, strategy)[0].items():
        assert counted.keys() == planned.keys(), name
        for pair, size in planned.items():
            assert counted[pair] == pytest.approx(size, rel=TOLERANCE), (name, pair)


def plan_with_unused(comm: Comm) -> bool:
    own = Comm(comm.rank, comm.world_size, comm.device, comm.group, comm.control)
    strategy = create("allreduce", allow_unused=True)
    with Sync(tiny(), lambda named: torch.optim.SGD([p for _, p in named], lr=0.1), strategy, own, "local") as sync:
        planned = planned_traffic("allreduce", sync)
    assert planned is not None
    return planned.links is not None


def test_where_parameters_may_be_unused_nothing_exact_is_promised(pool: Pool) -> None:
    assert pool.run(plan_with_unused, 2) == [False, False]


def algorithms(comm: Comm, strategy: str) -> list[str]:
    with Sync(
        tiny(), lambda named: torch.optim.SGD([p for _, p in named], lr=0.1), create(strategy), comm, "local"
    ) as s:
        planned = planned_traffic(strategy, s)
    assert planned is not None
    return list(planned.algorithms)


def test_the_algorithms_on_the_wire_are_named(pool: Pool) -> None:
    assert pool.run(algorithms, 2, "halving_doubling")[0] == ["halving_doubling"]
    assert pool.run(algorithms, 2, "ddp")[0] == ["ring"]
    assert pool.run(algorithms, 2, "none")[0] == []


def test_items_of_another_size_are_planned_too(pool: Pool) -> None:
    for name, (counted, planned) in pool.run(train_and_count, 3, "allreduce", torch.float64)[0].items():
        assert counted == planned, name


def test_the_root_carries_the_burden(pool: Pool) -> None:
    counted, _ = pool.run(train_and_count, 4, "gather_scatter")[0]["cnn"]
    sent = [sum(size for (source, _), size in counted.items() if source == rank) for rank in range(4)]
    assert sent[0] == 3 * sent[1] == 3 * sent[2] == 3 * sent[3]
    assert {pair for pair in counted if 0 not in pair} == set(), "the others do not speak to each other"
