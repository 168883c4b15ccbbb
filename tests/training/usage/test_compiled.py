"""Tests of compiled models, compiled losses, and loaders with worker processes."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import Tensor, nn

from registered import LOSSLESS
from training.usage.loops import Loop, Results, Usage, loss_of, make_model, train, usage_tests, weights

pytestmark = pytest.mark.takes(6)

# Dynamo's own split of DDP's graphs requires buckets of at least 1 MiB, so options for small buckets are left out.
STRATEGIES = [*LOSSLESS, "ddp:overlap=false", "ddp:bucket_view=true"]


def ignoring_warnings(usage: Usage) -> Usage:
    """Ignore warnings: Dynamo itself reads `.grad` of tensors that are not leaves, which makes torch warn."""

    @functools.wraps(usage)
    def run(loop: Loop) -> Results:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return usage(loop)

    return run


def compiled_before_attach(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(torch.compile(model, backend="eager"))
    train(loop, sync)
    return [weights(model)]


def compiled_in_place(loop: Loop) -> Results:
    model = make_model()
    model.compile(backend="aot_eager")
    train(loop, loop.attach(model))
    return [weights(model)]


def compiled_after_attach(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    call = torch.compile(sync.model, backend="eager")
    for x, y in loop.batches():
        loss_of(call(x), y).backward()
        sync.step()
    return [weights(model)]


@ignoring_warnings
def compiled_layer(loop: Loop) -> Results:
    model = make_model()
    model[2] = torch.compile(model[2], backend="eager")
    train(loop, loop.attach(model))
    return [weights(model)]


@ignoring_warnings
def compiled_loss(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    compiled = torch.compile(loss_of, backend="aot_eager")
    for x, y in loop.batches():
        compiled(sync.model(x), y).backward()
        sync.step()
    return [weights(model)]


@ignoring_warnings
def compiled_step(loop: Loop) -> Results:
    """Forward and loss are compiled as one function."""
    model = make_model()
    sync = loop.attach(model)

    @torch.compile(backend="eager")
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return loss_of(sync.model(x), y)

    for x, y in loop.batches():
        forward(x, y).backward()
        sync.step()
    return [weights(model)]


@ignoring_warnings
def scripted(loop: Loop) -> Results:
    model = make_model()
    train(loop, loop.attach(torch.jit.trace(model, torch.ones(1, 6, dtype=torch.float64))))
    return [weights(model)]


def vectorised(loop: Loop) -> Results:
    """`torch.func.vmap` over samples, inside the forward pass."""
    model = make_model(PerSample)
    train(loop, loop.attach(model))
    return [weights(model)]


class PerSample(nn.Module):
    """Model that maps one function over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to each sample."""
        return torch.func.vmap(lambda one: torch.tanh(self.linear.weight @ one) + self.linear.bias)(x)


USAGES = [
    compiled_before_attach,
    compiled_in_place,
    compiled_after_attach,
    compiled_layer,
    compiled_loss,
    compiled_step,
    scripted,
    vectorised,
]


test_compiled_models_train_as_in_one_process, test_the_results_depend_on_synchronisation = usage_tests(
    USAGES, turn=2, strategies=STRATEGIES
)
