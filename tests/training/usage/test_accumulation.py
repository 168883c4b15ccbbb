"""Tests of gradient accumulation, and of parts of different sizes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from training.usage.loops import STEPS, Loop, Results, loss_of, make_model, train, usage_tests, weights

pytestmark = pytest.mark.takes(3)


def equal_micro_batches(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        for number, (part_x, part_y) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            with sync.accumulate() if number == 0 else nullcontext():
                (loss_of(sync.model(part_x), part_y) / 2).backward()
        sync.step()
    return [weights(model)]


def uneven_micro_batches(loop: Loop) -> Results:
    """Micro-batches of 1 and 3 samples, each weighted by its share of the global batch of 8."""
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        parts = [(x[:1], y[:1]), (x[1:], y[1:])]
        for number, (part_x, part_y) in enumerate(parts):
            with sync.accumulate() if number == 0 else nullcontext():
                (loss_of(sync.model(part_x), part_y) * sync.weight(len(part_x), 8)).backward()
        sync.step()
    return [weights(model)]


def uneven_ranks(loop: Loop) -> Results:
    """One rank has 5 samples of a batch, the other 3."""
    model = make_model()
    sync = loop.attach(model)
    for step in range(STEPS):
        x, y = Loop().batches(1, step)[0]
        if loop.comm is not None:
            x, y = (x[:5], y[:5]) if loop.comm.rank == 0 else (x[5:], y[5:])
        (loss_of(sync.model(x), y) * sync.weight(len(x), 8)).backward()
        sync.step()
    return [weights(model)]


def different_numbers_of_micro_batches(loop: Loop) -> Results:
    """One rank accumulates two micro-batches, the other one; in one process, one accumulates."""
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        count = 2 if sync.rank == 0 else 1
        for number, (part_x, part_y) in enumerate(zip(x.chunk(count), y.chunk(count), strict=True)):
            with sync.accumulate() if number < count - 1 else nullcontext():
                (loss_of(sync.model(part_x), part_y) / count).backward()
        sync.step()
    return [weights(model)]


def rest_of_an_epoch_is_dropped(loop: Loop) -> Results:
    """The epoch ends inside `accumulate`, and its gradients are cleared before the next epoch."""
    model = make_model()
    sync = loop.attach(model)
    for epoch in range(2):
        train(loop, sync, 2, start=2 * epoch)
        x, y = loop.batches(1, 9)[0]
        with sync.accumulate():
            loss_of(sync.model(x), y).backward()
        sync.optimizer.zero_grad()
    return [weights(model)]


def rest_of_an_epoch_is_kept(loop: Loop) -> Results:
    """The epoch ends inside `accumulate`; the first step of the next epoch has these gradients too."""
    model = make_model()
    sync = loop.attach(model)
    for epoch in range(2):
        train(loop, sync, 2, start=2 * epoch)
        x, y = loop.batches(1, 9)[0]
        with sync.accumulate():
            loss_of(sync.model(x), y).backward()
    return [weights(model)]


def all_micro_batches_inside(loop: Loop) -> Results:
    """The last micro-batch too is inside `accumulate`; `step` averages its gradients."""
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
            with sync.accumulate():
                (loss_of(sync.model(part_x), part_y) / 2).backward()
        sync.step()
    return [weights(model)]


def step_inside(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        with sync.accumulate():
            loss_of(sync.model(x), y).backward()
            sync.step()
    return [weights(model)]


def forward_outside(loop: Loop) -> Results:
    """Only backward is inside `accumulate`."""
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        loss = loss_of(sync.model(x), y)
        with sync.accumulate():
            loss.backward()
        loss_of(sync.model(x), y).backward()
        sync.step()
    return [weights(model)]


def accumulation_and_clipping(loop: Loop) -> Results:
    """The norm is that of the whole batch."""
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        with sync.accumulate():
            (loss_of(sync.model(x[:2]), y[:2]) * sync.weight(2, 8)).backward()
        (loss_of(sync.model(x[2:]), y[2:]) * sync.weight(len(x) - 2, 8)).backward()
        sync.step(max_norm=0.05)
    return [weights(model)]


class Joined(nn.Module):
    """Model that concatenates parameters, whose gradients are then views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(2)) for _ in range(3))
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Scale the inputs, and apply a layer."""
        return self.linear(x * torch.cat(tuple(self.scales)))


def concatenated_parameters(loop: Loop) -> Results:
    """Accumulating into one of their gradients moves the version counter that autograd lets them share."""
    model = make_model(Joined)
    sync = loop.attach(model)
    for x, y in loop.batches():
        for number, (part_x, part_y) in enumerate(zip(x.chunk(4), y.chunk(4), strict=True)):
            with sync.accumulate() if number < 3 else nullcontext():
                (loss_of(sync.model(part_x), part_y) / 4).backward()
        sync.step()
    return [weights(model)]


def nested_accumulation(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        with sync.accumulate():
            with sync.accumulate():
                loss_of(sync.model(x), y).backward()
            loss_of(sync.model(x), y).backward()
        loss_of(sync.model(x), y).backward()
        sync.step()
    return [weights(model)]


def skipped_step(loop: Loop) -> Results:
    """All ranks skip a step, because of a value that is the same on all of them."""
    model = make_model()
    sync = loop.attach(model)
    for step, (x, y) in enumerate(loop.batches(5)):
        loss = loss_of(sync.model(x), y)
        if sync.mean(float(loss.detach()), len(x)) > 1e9 or step == 2:
            continue
        loss.backward()
        sync.step()
    return [weights(model)]


USAGES = [
    equal_micro_batches,
    uneven_micro_batches,
    uneven_ranks,
    different_numbers_of_micro_batches,
    rest_of_an_epoch_is_dropped,
    rest_of_an_epoch_is_kept,
    all_micro_batches_inside,
    step_inside,
    forward_outside,
    accumulation_and_clipping,
    concatenated_parameters,
    nested_accumulation,
    skipped_step,
]


test_accumulated_gradients_are_those_of_one_process, test_the_results_depend_on_synchronisation = usage_tests(
    USAGES, turn=0
)
