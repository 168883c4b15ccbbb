"""`parameter_server` in a user's loop: loaded and changed weights, settings of the optimiser, GradScaler."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from paceline.comm import Comm
from paceline.errors import PacelineError, UsageError
from paceline.strategies.base.abilities import ServesParameters
from paceline.strategies.base.scaling import checked_scaler
from paceline.strategies.base.strategy import NamedParameters, Strategy
from paceline.strategies.registry import create
from paceline.training.sync import Sync
from ranks import Pool
from strategies.parameter_server.test_strategy import adam, make_model, on_extra_ranks, sgd, weights

pytestmark = pytest.mark.takes(12)

SYNCHRONOUS = ["parameter_server", "parameter_server:servers=2"]
ASYNCHRONOUS = ["parameter_server:asynchronous=true", "parameter_server:asynchronous=true,servers=2"]
SHARES = 3
"""Number of steps in a round; in each, every rank trains on its own samples."""
CHANGED = "weights were changed outside step()"
Change = Callable[[Sync], None]


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


def error_of(sync: Sync, change: Change) -> str:
    """Train a round, make a change on this rank, train another round; return the message of the error."""
    try:
        with sync:
            train(sync, 0)
            change(sync)
            train(sync, 1)
    except PacelineError as error:
        return error.message
    except RuntimeError as error:
        return f"lost a peer: {type(error).__name__}"
    return "nothing"


# Loading.


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
