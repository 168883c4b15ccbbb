"""Synchronous and asynchronous policies in a user's loop: half precision, GradScaler, and runs without a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import Comm
from paceline.errors import UsageError
from paceline.strategies.base.abilities import ServesParameters
from paceline.strategies.base.scaling import checked_scaler
from paceline.strategies.base.strategy import Strategy
from paceline.strategies.registry import create
from paceline.training.sync import Sync
from ranks import Pool
from strategies.parameter_server.test_load_hooks import ASYNCHRONOUS, SYNCHRONOUS
from strategies.parameter_server.test_strategy import adam, make_model, on_extra_ranks, sgd, weights

pytestmark = pytest.mark.takes(1)


def sum_large_gradients(comm: Comm, dtype: torch.dtype) -> float:
    """Return the weight after a step with a gradient whose sum over the ranks has no finite value in float16."""
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    nn.init.zeros_(model.weight)
    with Sync(model, lambda named: torch.optim.SGD(named, lr=2**-10), create(SYNCHRONOUS[0]), comm, "local") as sync:
        (sync.model(torch.ones(1, 1, dtype=dtype)) * (40960 + 4096 * comm.rank)).sum().backward()
        sync.step()
    return float(model.weight.detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_in_half_precision_do_not_overflow(pool: Pool, dtype: torch.dtype) -> None:
    assert pool.run(sum_large_gradients, 2, dtype) == [-42.0, -42.0]


def train_scaled(comm: Comm, text: str) -> Any:
    """Train with a GradScaler; rank 1 overflows in one step. Return weights, scales and which steps changed weights."""
    return _train_scaled(comm, create(text))


def train_scaled_extra(comm: Comm, text: str, servers: int) -> Any:
    return on_extra_ranks(comm, text, servers, _train_scaled)


def _train_scaled(comm: Comm, strategy: Strategy) -> Any:
    model = make_model()
    if comm.is_server:
        strategy.attach(model, sgd, comm)
        assert isinstance(strategy, ServesParameters)
        strategy.serve()
        strategy.close()
        return None
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scales, changes = [], []
    sync = Sync(model, sgd, strategy, comm, "local")
    for step in range(6):
        torch.manual_seed(10 * step + comm.rank)
        before = weights(model)
        loss = sync.model(torch.randn(4, 6)).square().mean()
        scaler.scale(loss * (torch.inf if step == 2 and comm.rank == comm.world_size - 1 else 1)).backward()
        sync.step(max_norm=0.05 if step % 2 else None, scaler=checked_scaler(scaler, strategy))
        scales.append(scaler.get_scale())
        changes.append(not torch.equal(weights(model), before))
        assert all(parameter.grad is None for parameter in model.parameters())
    sync.detach()
    return weights(model), scales, changes


@pytest.mark.parametrize("text", SYNCHRONOUS)
def test_workers_unscale_and_skip_together(pool: Pool, text: str) -> None:
    right = pool.run(train_scaled, 2, "allreduce")
    torch.testing.assert_close(pool.run(train_scaled, 2, text), right)
    assert right[0][1:] == ([1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0], [True, True, False, True, True, True])


def test_servers_on_separate_ranks_wait_during_a_skipped_step(pool: Pool) -> None:
    right = pool.run(train_scaled, 2, "allreduce")
    found = pool.run(train_scaled_extra, 4, "parameter_server:extra=true,servers=2", 2)
    torch.testing.assert_close(found[:2], right)


def test_asynchronous_servers_refuse_a_scaler() -> None:
    with pytest.raises(UsageError, match="does not support a GradScaler in asynchronous mode"):
        checked_scaler(torch.amp.GradScaler("cpu"), create(ASYNCHRONOUS[0]))


def without_a_step(comm: Comm, text: str) -> Tensor:
    """Use every call that needs no step; return the agreed weights."""
    torch.manual_seed(comm.rank)
    model = nn.Linear(6, 3)
    with Sync(model, adam, create(text), comm, "local") as sync:
        sync.model.eval()
        with sync.agreed() as agreed:
            found = weights(agreed)
        state = sync.strategy.state().copy()
        assert not sync.strategy.load(state)
        if not sync.strategy.lockstep:
            assert sync.optimizer.state_dict()["state"] == {}
        sync.optimizer.zero_grad()
        assert torch.equal(weights(model), found)
    return found


@pytest.mark.parametrize("text", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_a_run_may_have_no_step(pool: Pool, text: str) -> None:
    first, second = pool.run(without_a_step, 2, text)
    assert torch.equal(first, second)
