"""Tests of gradients that a user's loop changes or drops between backward and the step, and of repeated backward."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from paceline.strategies.registry import create
from ranks import Pool
from training.usage.loops import (
    RANKS,
    STRATEGIES,
    Loop,
    Results,
    Usage,
    loss_of,
    make_model,
    run_usages,
    same_in_one_process,
    train,
    usage_tests,
    weights,
)

pytestmark = pytest.mark.takes(1)

AGREEING = [text for text in STRATEGIES if create(text).agrees_in_backward]
"""Strategies under which backward returns with the mean over the ranks in `.grad`."""
EARLY = [text for text in STRATEGIES if text.startswith("priority")]
"""Strategies that have sent a gradient, and not received the mean, when backward returns."""


def scaled(loop: Loop) -> Results:
    """A factor for the gradient gives the same mean, whether it is applied before or after averaging."""
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        loss_of(sync.model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        sync.step()
    return [weights(model)]


def replaced(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        loss_of(sync.model(x), y).backward()
        model[0].weight.grad = model[0].weight.grad * 0.5
        sync.step()
    return [weights(model)]


def dropped(loop: Loop) -> Results:
    """All ranks drop the gradients of one step after backward."""
    model = make_model()
    sync = loop.attach(model)
    for step, (x, y) in enumerate(loop.batches(5)):
        loss_of(sync.model(x), y).backward()
        if step == 2:
            sync.optimizer.zero_grad()
            continue
        sync.step()
    return [weights(model)]


def accumulated_without_accumulate(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
            (loss_of(sync.model(part_x), part_y) / 2).backward()
        sync.step()
    return [weights(model)]


def backward_twice_without_accumulate(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        loss = loss_of(sync.model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        sync.step()
    return [weights(model)]


def two_forwards_then_two_backwards(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        losses = [loss_of(sync.model(x), y), loss_of(sync.model(-x), y)]
        for loss in losses:
            loss.backward()
        sync.step()
    return [weights(model)]


CHANGES = [scaled, replaced, dropped]
REPEATED = [accumulated_without_accumulate, backward_twice_without_accumulate, two_forwards_then_two_backwards]
USAGES = [*CHANGES, *REPEATED]


test_changes_take_effect_on_all_ranks_alike, test_the_results_depend_on_synchronisation = usage_tests(
    USAGES, turn=4, strategies=[text for text in STRATEGIES if text not in EARLY]
)


@pytest.mark.parametrize("text", EARLY)
@pytest.mark.parametrize("usage", USAGES)
def test_changes_after_sending_are_refused(pool: Pool, text: str, usage: Usage) -> None:
    for found in pool.run(run_usages, RANKS, text, [(usage.__module__, usage.__name__)]):
        result = found[usage.__name__]
        assert isinstance(result, str), "the change was lost"
        assert "WorkloadError: " in result
        assert "hint: " in result


def clipped_by_norm(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        loss_of(sync.model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        sync.step()
    return [weights(model)]


def clipped_by_value(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        loss_of(sync.model(x), y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        sync.step()
    return [weights(model)]


def clamped_through_data(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        loss_of(sync.model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad.data.clamp_(-0.01, 0.01)
        sync.step()
    return [weights(model)]


test_clipping_by_hand_is_that_of_the_mean = same_in_one_process(
    [clipped_by_norm, clipped_by_value, clamped_through_data], turn=4, strategies=AGREEING
)


def create_graph(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a reference cycle.
            loss_of(sync.model(x), y).backward(create_graph=True)
        sync.step()
    return [weights(model)]


test_gradients_with_a_graph = same_in_one_process(
    [create_graph], turn=5, strategies=[text for text in STRATEGIES if not text.startswith("ddp")]
)


def optimizer_state_saved_at_once(loop: Loop) -> Results:
    """The state of the optimiser is saved right after a step, before any weight is read."""
    model = make_model()
    sync = loop.attach(model, lambda named: torch.optim.Adam(named, lr=0.05))
    train(loop, sync, 3)
    state = sync.optimizer.state_dict()
    kept = [value["exp_avg"].clone() for value in state["state"].values()]
    return [weights(model), *kept]


test_the_state_of_the_optimiser_is_that_of_the_last_step = same_in_one_process(
    [optimizer_state_saved_at_once],
    turn=6,
    strategies=[text for text in STRATEGIES if not text.startswith("parameter_server")],
)
