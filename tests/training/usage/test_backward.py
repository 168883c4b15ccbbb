"""Tests of backward passes: second derivatives, several losses, shared parameters, checkpointed activations."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from training.usage.loops import STEPS, Loop, Results, loss_of, make_model, train, usage_tests, weights

pytestmark = pytest.mark.takes(3)


class Tied(nn.Module):
    """Model that uses one weight matrix twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.hidden = nn.Linear(6, 6)
        self.out = nn.Linear(6, 7, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        return self.out(torch.tanh(self.hidden(self.embedding(tokens))))


def tied_weights(loop: Loop) -> Results:
    model = make_model(Tied)
    sync = loop.attach(model)
    for step in range(STEPS):
        tokens = loop.share(torch.arange(16).reshape(8, 2) * (step + 2) % 7)
        nn.functional.cross_entropy(sync.model(tokens[:, 0]), tokens[:, 1]).backward()
        sync.step()
    return [weights(model)]


def layer_called_twice(loop: Loop) -> Results:
    shared = []

    def build() -> nn.Module:
        shared.append(nn.Linear(8, 8))
        return nn.Sequential(nn.Linear(6, 8), shared[0], nn.Tanh(), shared[0], nn.Tanh(), nn.Linear(8, 3))

    model = make_model(build)
    train(loop, loop.attach(model))
    return [weights(model)]


def two_losses_summed(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        output = sync.model(x)
        (loss_of(output, y) + 0.1 * output.abs().mean()).backward()
        sync.step()
    return [weights(model)]


def two_forwards_one_backward(loop: Loop) -> Results:
    """Siamese networks and contrastive losses call the model twice before backward."""
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        loss_of(sync.model(x) + sync.model(-x), y).backward()
        sync.step()
    return [weights(model)]


def two_backwards(loop: Loop) -> Results:
    """Two losses with their own backward pass: all but the last inside `accumulate`, forward included."""
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        with sync.accumulate():
            (0.1 * sync.model(x).abs().mean()).backward()
        loss_of(sync.model(x), y).backward()
        sync.step()
    return [weights(model)]


def backward_twice(loop: Loop) -> Results:
    """One graph has two backward passes, the first inside `accumulate`."""
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        with sync.accumulate():
            loss = loss_of(sync.model(x), y)
            loss.backward(retain_graph=True)
        loss.backward()
        sync.step()
    return [weights(model)]


def gradients_by_hand(loop: Loop) -> Results:
    """`torch.autograd.grad` computes the gradients, and the loop sets `.grad`."""
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss_of(sync.model(x), y), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        sync.step()
    return [weights(model)]


def gradients_of_inputs(loop: Loop) -> Results:
    """An adversarial example is made with `torch.autograd.grad` before each step."""
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss_of(sync.model(x), y), x)
        loss_of(sync.model((x + 0.1 * slope.sign()).detach()), y).backward()
        sync.step()
    return [weights(model)]


def backward_of_named_inputs(loop: Loop) -> Results:
    """`backward(inputs=…)` computes gradients of the named parameters."""
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        loss_of(sync.model(x), y).backward(inputs=list(model.parameters()))
        sync.step()
    return [weights(model)]


def autograd_backward(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        output = sync.model(x)
        torch.autograd.backward([output], [2 * (output - y).detach() / y.numel()])
        sync.step()
    return [weights(model)]


def gradient_penalty(loop: Loop) -> Results:
    """WGAN-GP: the penalty needs the gradient with respect to the input, and its derivative."""
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        x = x.clone().requires_grad_()
        output = sync.model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (loss_of(output, y) + 0.1 * (slope.norm(dim=1) - 1).square().mean()).backward()
        sync.step()
    return [weights(model)]


def reentrant_checkpoint(loop: Loop) -> Results:
    model = make_model(lambda: Checkpointed(True))
    train(loop, loop.attach(model))
    return [weights(model)]


def checkpoint_without_reentry(loop: Loop) -> Results:
    model = make_model(lambda: Checkpointed(False))
    train(loop, loop.attach(model))
    return [weights(model)]


class Checkpointed(nn.Module):
    """Model that computes its middle layers again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        """Checkpoint the middle layers, in two parts and as one."""
        hidden = checkpoint_sequential(self.middle, 2, self.first(x), use_reentrant=self.reentrant)
        return self.last(checkpoint(self.middle[1], hidden, use_reentrant=self.reentrant))


def checkpointed_call(loop: Loop) -> Results:
    """The call of the whole model is checkpointed."""
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        loss_of(checkpoint(sync.model, x, use_reentrant=False), y).backward()
        sync.step()
    return [weights(model)]


def own_function(loop: Loop) -> Results:
    """A user's own autograd function."""
    model = make_model(lambda: nn.Sequential(nn.Linear(6, 8), Cube(), nn.Linear(8, 3)))
    train(loop, loop.attach(model))
    return [weights(model)]


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


class Cube(nn.Module):
    """Third power, with its own derivative."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the third power."""
        result: Tensor = _Cube.apply(x)  # type: ignore[no-untyped-call]
        return result


def anomaly_detection(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        train(loop, sync)
    return [weights(model)]


def frozen_layers(loop: Loop) -> Results:
    model = make_model()
    model[0].requires_grad_(False)
    train(loop, loop.attach(model))
    return [weights(model)]


def different_parameters_on_each_rank(loop: Loop) -> Results:
    """Each part of a batch uses another branch, as with a mixture of experts."""
    model = make_model(Branches)
    sync = loop.attach(model, allow_unused=True)
    for step in range(STEPS):
        for number, part in enumerate(loop.parts):
            x, y = loop.batches(1, step)[0]
            if loop.comm is None:
                x, y = x[part::2], y[part::2]
            last = number == len(loop.parts) - 1
            with nullcontext() if last else sync.accumulate():
                (loss_of(sync.model(x, part), y) / len(loop.parts)).backward()
        sync.step()
    return [weights(model)]


class Branches(nn.Module):
    """Model with a common layer and two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(6, 6)
        self.branches = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        """Apply one of the branches."""
        return self.branches[branch](torch.tanh(self.common(x)))


USAGES = [
    tied_weights,
    layer_called_twice,
    two_losses_summed,
    two_forwards_one_backward,
    two_backwards,
    backward_twice,
    gradients_by_hand,
    gradients_of_inputs,
    backward_of_named_inputs,
    autograd_backward,
    gradient_penalty,
    reentrant_checkpoint,
    checkpoint_without_reentry,
    checkpointed_call,
    own_function,
    anomaly_detection,
    frozen_layers,
    different_parameters_on_each_rank,
]


test_gradients_are_those_of_one_process, test_the_results_depend_on_synchronisation = usage_tests(USAGES, turn=1)
