"""Tests of the state of the optimiser: loading and saving it after `attach`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from training.usage.loops import Loop, Results, make_model, train, usage_tests, weights

pytestmark = pytest.mark.takes(1)


def optimizer_state_after_attach(loop: Loop) -> Results:
    """Model and optimiser continue from a checkpoint of one process, loaded on every rank after `attach`."""
    model, kept = make_model(), _checkpoint()
    sync = loop.attach(model, adam)
    model.load_state_dict(kept["model"])
    sync.optimizer.load_state_dict(kept["optimizer"])
    train(loop, sync, 3, start=3)
    return [weights(model)]


def optimizer_state_in_the_middle(loop: Loop) -> Results:
    """Training goes back to a checkpoint."""
    model, kept = make_model(), _checkpoint()
    sync = loop.attach(model, adam)
    train(loop, sync, 3)
    model.load_state_dict(kept["model"])
    sync.optimizer.load_state_dict(kept["optimizer"])
    train(loop, sync, 3, start=3)
    return [weights(model)]


def optimizer_state_cleared(loop: Loop) -> Results:
    """Momentum is reset in the middle of training."""
    model = make_model()
    sync = loop.attach(model)
    train(loop, sync, 2)
    with sync.agreed():
        sync.optimizer.state.clear()
    train(loop, sync, 2, start=2)
    return [weights(model)]


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(named, lr=0.05)


def _checkpoint() -> dict[str, Any]:
    alone = Loop()
    model = make_model()
    sync = alone.attach(model, adam)
    train(alone, sync, 3)
    return {"model": model.state_dict(), "optimizer": copy.deepcopy(sync.optimizer.state_dict())}


USAGES = [
    optimizer_state_after_attach,
    optimizer_state_in_the_middle,
    optimizer_state_cleared,
]


test_training_continues_as_in_one_process, test_the_results_depend_on_synchronisation = usage_tests(USAGES, turn=8)
