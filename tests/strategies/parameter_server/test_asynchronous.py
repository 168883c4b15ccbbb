"""`AsyncServer`: learning rate per update, and damping and dropping of stale gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.comm import Comm
from paceline.records.summary import StalenessSummary
from paceline.strategies.base.strategy import NamedParameters
from paceline.strategies.parameter_server.asynchronous import AsyncServer
from paceline.strategies.parameter_server.optimizer_settings import OptimizerSettings
from paceline.strategies.parameter_server.protocol import RequestKind, ServerRequest
from paceline.strategies.parameter_server.server import ServerSetup
from paceline.strategies.parameter_server.server_shard import ServerShard
from paceline.strategies.parameter_server.staleness import StalenessLimit
from paceline.strategies.registry import create
from paceline.training.sync import Sync
from ranks import Pool


def sgd(named: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=7.0)


def updates(comm: Comm, limit: StalenessLimit, versions: list[int]) -> tuple[list[float], list[int], dict[str, Any]]:
    """Update a server's weight of 0 with gradients of 1, computed with weights of the given versions.

    Return the weight after each update, the tickets, and the staleness.
    """
    named = [("w", nn.Parameter(torch.zeros(1)))]
    shard = ServerShard(comm.rank, named, comm.device)
    setup = ServerSetup(
        shards=[shard],
        parameters=named,
        optimizer=sgd(named),
        make_optimizer=sgd,
        comm=comm,
        group=comm.group,
        update=lambda: None,
        report_mean=lambda _: None,
        limit=limit,
    )
    server = AsyncServer.beside_worker(shard, setup)
    settings = OptimizerSettings(torch.optim.SGD(named, lr=1.0)).read()
    weights, tickets = [], []
    for version in versions:
        request = ServerRequest(RequestKind.PUSH, version, settings=settings)
        tickets.append(server.update([torch.ones(1)], request))
        weights.append(float(server.parameters[0].detach()))
    assert float(named[0][1].detach()) == 0, "the worker's weight is another"
    return weights, tickets, server.staleness.summary(limit.max_staleness or None)


def step_once(comm: Comm) -> float:
    """Let each worker step once with a gradient of 1 and a learning rate of 1; return the change of the weight."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    strategy = create("parameter_server:asynchronous=true,max_staleness=0")
    with Sync(model, lambda named: torch.optim.SGD(named, lr=1.0), strategy, comm, "local") as sync:
        sync.model(torch.ones(1, 1)).sum().backward()
        sync.step()
        strategy.finish()
        return float(model.weight.detach())


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_one_update_per_worker_equals_one_step(pool: Pool, workers: int) -> None:
    assert pool.run(step_once, workers) == pytest.approx([-1.0] * workers, rel=1e-6)


def step_with_own_settings(comm: Comm) -> float:
    """Make three steps with gradients of 1, on ranks other than 0 without a learning rate; return the new weight."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    strategy = create("parameter_server:asynchronous=true,max_staleness=0")
    with Sync(model, lambda named: torch.optim.SGD(named, lr=1.0), strategy, comm, "local") as sync:
        sync.optimizer.param_groups[0]["lr"] = 1.0 if comm.rank == 0 else 0.0
        for _ in range(3):
            sync.model(torch.ones(1, 1)).sum().backward()
            sync.step()
        strategy.finish()
        return float(model.weight.detach())


def test_a_server_keeps_the_settings_of_each_worker(pool: Pool) -> None:
    """A worker sends its settings only when they have changed, so the server must remember them."""
    assert pool.run(step_with_own_settings, 3) == pytest.approx([-1.0] * 3, rel=1e-6)


def test_stale_gradients_are_damped_and_counted(pool: Pool) -> None:
    ((weights, tickets, staleness),) = pool.run(updates, 1, StalenessLimit(2, drops=False), [0] * 5)
    assert weights == pytest.approx([-1, -2, -3, -3 - 2 / 3, -3 - 2 / 3 - 2 / 4])
    assert tickets == [1, 2, 3, 4, 5]
    assert staleness == StalenessSummary(
        gradients=5,
        mean=2.0,
        median=2,
        max=4,
        max_allowed=2,
        damped=2,
        dropped=0,
        counts=[(staleness, 1) for staleness in range(5)],
    )


def test_stale_gradients_are_dropped_and_counted(pool: Pool) -> None:
    ((weights, tickets, staleness),) = pool.run(updates, 1, StalenessLimit(1, drops=True), [0, 0, 0, 0, 2])
    assert weights == [-1, -2, -2, -2, -3], "a dropped gradient is not an update"
    assert tickets == [1, 2, 3, 4, 5]
    assert (staleness.dropped, staleness.damped) == (2, 0)


def test_without_a_limit_no_gradient_is_dropped(pool: Pool) -> None:
    ((weights, _, staleness),) = pool.run(updates, 1, StalenessLimit(0, drops=True), [0, 0, 0])
    assert weights == [-1, -2, -3]
    assert staleness.dropped == 0
