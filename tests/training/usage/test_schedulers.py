"""Tests of learning-rate schedulers, per step and per epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from training.usage.loops import Loop, Results, loss_of, make_model, sgd, train, usage_tests, weights

pytestmark = pytest.mark.takes(1)


def _per_step(loop: Loop, make_scheduler: Any, make_optimizer: Any = sgd) -> Results:
    model = make_model()
    sync = loop.attach(model, make_optimizer)
    scheduler = make_scheduler(sync.optimizer)
    rates = []
    for x, y in loop.batches(6):
        loss_of(sync.model(x), y).backward()
        sync.step()
        scheduler.step()
        rates.append(float(sync.optimizer.param_groups[0]["lr"]))
    return [weights(model), torch.tensor(rates)]


def step_lr(loop: Loop) -> Results:
    return _per_step(loop, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5))


def one_cycle(loop: Loop) -> Results:
    """OneCycleLR changes the momentum too."""
    return _per_step(loop, lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=8))


def one_cycle_of_adam(loop: Loop) -> Results:
    """With Adam, OneCycleLR changes the first of two betas."""
    make = lambda named: torch.optim.Adam(named, lr=0.01)  # noqa: E731
    return _per_step(loop, lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=8), make)


def lambda_lr(loop: Loop) -> Results:
    return _per_step(loop, lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)))


def warm_restarts(loop: Loop) -> Results:
    return _per_step(loop, lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2))


def sequential(loop: Loop) -> Results:
    """Warm-up, then a cosine."""

    def make(optimizer: torch.optim.Optimizer) -> Any:
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[2])

    return _per_step(loop, make)


def per_epoch(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(sync.optimizer, 0.5)
    for epoch in range(3):
        train(loop, sync, 2, start=2 * epoch)
        scheduler.step()
    return [weights(model), torch.tensor(scheduler.get_last_lr())]


def plateau(loop: Loop) -> Results:
    """ReduceLROnPlateau needs the same value on every rank: the mean over the ranks."""
    model = make_model()
    sync = loop.attach(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(sync.optimizer, factor=0.5, patience=0, threshold=0.5)
    for x, y in loop.batches(6):
        loss = loss_of(sync.model(x), y)
        loss.backward()
        sync.step()
        scheduler.step(sync.mean(float(loss.detach()), len(x)))
    return [weights(model), torch.tensor(sync.optimizer.param_groups[0]["lr"])]


def scheduler_that_is_restored(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    scheduler = torch.optim.lr_scheduler.StepLR(sync.optimizer, 1, gamma=0.5)
    train(loop, sync, 2)
    scheduler.step()
    kept = scheduler.state_dict()
    scheduler = torch.optim.lr_scheduler.StepLR(sync.optimizer, 1, gamma=0.5)
    scheduler.load_state_dict(kept)
    train(loop, sync, 2, start=2)
    scheduler.step()
    return [weights(model), torch.tensor(scheduler.get_last_lr())]


USAGES = [
    step_lr,
    one_cycle,
    one_cycle_of_adam,
    lambda_lr,
    warm_restarts,
    sequential,
    per_epoch,
    plateau,
    scheduler_that_is_restored,
]


test_schedules_are_those_of_one_process, test_the_results_depend_on_synchronisation = usage_tests(USAGES, turn=9)
