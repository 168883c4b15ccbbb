"""Hooks on `load_state_dict` and `state_dict` in a user's loop: servers follow what it loads, or refuse it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from paceline.comm import Comm, close_comm, open_comm
from paceline.errors import RankError, WorkloadError
from paceline.strategies.base.strategy import NamedParameters
from paceline.strategies.registry import create
from paceline.training.sync import Sync
from ranks import Pool
from strategies.parameter_server.test_strategy import make_model, sgd, weights

pytestmark = pytest.mark.takes(5)

SYNCHRONOUS = ["parameter_server", "parameter_server:servers=2"]
ASYNCHRONOUS = ["parameter_server:asynchronous=true", "parameter_server:asynchronous=true,servers=2"]
SHARES = 3
"""Number of steps in a round; in each, every rank trains on its own samples."""


def train(sync: Sync, round_: int, scheduler: Any = None, max_norm: float | None = None) -> None:
    """Train a round; under asynchronous servers, one rank after the other."""
    for step in range(SHARES):
        torch.manual_seed(100 * round_ + 10 * step + sync.rank)
        for rank in [sync.rank] if sync.strategy.lockstep else range(sync.ranks):
            if rank == sync.rank:
                sync.model(torch.randn(4, 6, dtype=next(sync.model.parameters()).dtype)).square().mean().backward()
                sync.step(max_norm)
                if scheduler is not None:
                    scheduler.step()
            if not sync.strategy.lockstep:
                sync.comm.control.barrier()


def saved(optimizer: Any = sgd) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a checkpoint with other weights, momentum and learning rate than those of a new run."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    made = optimizer(list(model.named_parameters()))
    model(torch.randn(4, 6)).square().mean().backward()
    made.step()
    made.param_groups[0]["lr"] = 0.02
    return copy.deepcopy(model.state_dict()), copy.deepcopy(made.state_dict())


def resume(comm: Comm, text: str, when: str, parts: Sequence[str]) -> list[Tensor]:
    """Load a checkpoint before or after `attach`, or after a round; return the weights after each of two rounds."""
    model, (loaded, loaded_optimizer) = make_model(), saved()

    def make(parameters: NamedParameters) -> torch.optim.Optimizer:
        optimizer = sgd(parameters)
        if when == "before" and "optimizer" in parts:
            optimizer.load_state_dict(loaded_optimizer)
        return optimizer

    if when == "before" and "model" in parts:
        model.load_state_dict(loaded)
    with Sync(model, make, create(text), comm, "broadcast") as sync:
        if when == "later":
            train(sync, 7)
        if when != "before":
            if "model" in parts:
                model.load_state_dict(loaded)
            if "optimizer" in parts:
                sync.optimizer.load_state_dict(loaded_optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(sync.optimizer, 2, gamma=0.1)
        found = []
        for round_ in range(2):
            train(sync, round_, scheduler)
            with sync.agreed():
                found.append(weights(model))
    return found


@pytest.mark.parametrize("text", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_a_checkpoint_can_be_loaded_before_and_after_attach(pool: Pool, text: str) -> None:
    both = ("model", "optimizer")
    before = pool.run(resume, 2, text, "before", both)
    again = pool.run(resume, 2, text, "after", both)
    later = pool.run(resume, 2, text, "later", both)
    if text in SYNCHRONOUS:
        right = pool.run(resume, 2, "allreduce", "before", both)
        torch.testing.assert_close(before, right)
    for found in (before, again, later):
        torch.testing.assert_close(found, [before[0]] * 2, rtol=0, atol=0)


@pytest.mark.parametrize("text", [*SYNCHRONOUS, *ASYNCHRONOUS])
@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_loading_one_part_keeps_the_other(pool: Pool, text: str, part: str) -> None:
    before = pool.run(resume, 2, text, "before", (part,))
    after = pool.run(resume, 2, text, "after", (part,))
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert not torch.equal(after[0][0], pool.run(resume, 2, text, "after", ())[0][0])


def load_on_rank_0(comm: Comm, part: str) -> str:
    """Load on rank 0 alone, where asynchronous servers wait for all ranks; return the message of the error."""
    close_comm(comm)
    ours = open_comm(range(2), device=comm.device, backend="gloo", timeout_s=1.0)
    if ours is None:
        return "nothing"
    sync = Sync(make_model(), sgd, create(ASYNCHRONOUS[0]), ours, "local")
    message = "nothing"
    if sync.rank == 0:
        model, optimizer = saved()
        try:
            sync.strategy.model.load_state_dict(model) if part == "model" else sync.optimizer.load_state_dict(optimizer)
        except RankError as error:
            message = error.message
    sync.strategy.abandon()
    close_comm(ours)
    return message


@pytest.mark.parametrize(("part", "call"), [("model", "model"), ("optimizer", "sync.optimizer")])
def test_asynchronous_servers_refuse_a_load_on_one_rank(pool: Pool, part: str, call: str) -> None:
    first, *others = pool.run(load_on_rank_0, 4, part)
    assert first == f"rank 0 called {call}.load_state_dict(), but not all ranks did so within 1 s."
    assert set(others) == {"nothing"}


def state_dict_of(comm: Comm, text: str) -> Any:
    """Return the state dict of the optimiser after a round, or the message of the error, and the hint."""
    with Sync(make_model(), sgd, create(text), comm, "local") as sync:
        train(sync, 0)
        with sync.agreed():
            try:
                found = sync.optimizer.state_dict()
            except WorkloadError as error:
                found = {"error": (error.message, error.hint)}
            comm.control.barrier()
    return found


def assert_same(found: dict[str, Any], right: dict[str, Any]) -> None:
    torch.testing.assert_close(found["state"], right["state"])
    assert found["param_groups"] == right["param_groups"]


def test_an_optimiser_returns_its_whole_state_or_none(pool: Pool) -> None:
    right = pool.run(state_dict_of, 2, "allreduce")[0]
    beside, other = pool.run(state_dict_of, 2, SYNCHRONOUS[0])
    assert_same(beside, right)
    message = "rank {} does not have the whole state of the optimiser: servers on other ranks keep the state of {}."
    everywhere = "call sync.strategy.state() on every rank, or use servers=1 and save on rank 0"
    assert other["error"] == (message.format(1, "4 parameters"), "call sync.optimizer.state_dict() on rank 0 only")
    first, second = pool.run(state_dict_of, 2, SYNCHRONOUS[1])
    assert first["error"] == (message.format(0, "3 parameters"), everywhere)
    assert second["error"] == (message.format(1, "1 parameter"), everywhere)
    (alone,), (right_alone,) = pool.run(state_dict_of, 1, ASYNCHRONOUS[0]), pool.run(state_dict_of, 1, "allreduce")
    assert_same(alone, right_alone)
    first, second = pool.run(state_dict_of, 2, ASYNCHRONOUS[1])
    assert_same(first, second)
    assert list(first["state"]) == list(right["state"])
    assert first["param_groups"] == right["param_groups"], "the learning rate is the user's own"


def copy_a_model(comm: Comm, text: str) -> list[str]:
    """Load into copies of an attached model, and into the model after the end; return the hooks left on it."""
    model, (loaded, _) = make_model(), saved()
    with Sync(model, sgd, create(text), comm, "local") as sync:
        if comm.rank == 0:  # A copy has no servers, so that a load waits for no other rank.
            pickled = pickle.loads(pickle.dumps(model))  # noqa: S301
            for copied in (copy.deepcopy(model), pickled, AveragedModel(model).module):
                copied.load_state_dict(loaded)
                assert not torch.equal(weights(copied), weights(model))
        train(sync, 0)
        optimizer = sync.optimizer
        hooks = [model._load_state_dict_post_hooks, optimizer._optimizer_state_dict_post_hooks]
        assert all(hooks)
        hooks.append(optimizer._optimizer_load_state_dict_post_hooks)
    model.load_state_dict(loaded)
    return [str(hook) for hook in hooks if hook]


def test_copies_of_a_model_have_no_servers(pool: Pool) -> None:
    for text in (SYNCHRONOUS[1], ASYNCHRONOUS[1]):
        assert pool.run(copy_a_model, 2, text) == [[], []]
