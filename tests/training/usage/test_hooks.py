"""Tests of hooks that a user's loop registers on modules, tensors, parameters and the optimiser."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from training.usage.loops import Loop, Results, loss_of, make_model, train, usage_tests, weights

pytestmark = pytest.mark.takes(1)


def forward_hooks(loop: Loop) -> Results:
    model = make_model()
    calls = []
    model[1].register_forward_hook(lambda _, __, output: output * 1.5)
    model[2].register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0].shape[1]))
    sync = loop.attach(model)
    model[3].register_forward_hook(lambda _, __, output: output + 0.1)
    sync.model.register_forward_hook(lambda _, __, output: output * 2)
    train(loop, sync)
    return [weights(model), torch.tensor(calls)]


def full_backward_hooks(loop: Loop) -> Results:
    model = make_model()
    model[2].register_full_backward_hook(lambda _, inputs, __: (inputs[0] * 0.5,))
    sync = loop.attach(model)
    model[4].register_full_backward_hook(lambda _, inputs, __: (inputs[0] * 2,))
    model[2].register_full_backward_pre_hook(lambda _, outputs: (outputs[0] * 1.5,))
    train(loop, sync)
    return [weights(model)]


def tensor_hooks_that_scale(loop: Loop) -> Results:
    model = make_model()
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    sync = loop.attach(model)
    model[4].bias.register_hook(lambda gradient: gradient * 3)
    train(loop, sync)
    return [weights(model)]


def tensor_hooks_on_activations(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        output = sync.model(x)
        output.register_hook(lambda gradient: gradient * 0.25)
        loss_of(output, y).backward()
        sync.step()
    return [weights(model)]


def gradient_hooks_before_attach(loop: Loop) -> Results:
    """Hooks on accumulated gradients run in the order of their registration, so this one changes what is sent."""
    model = make_model()
    model[2].weight.register_post_accumulate_grad_hook(_scale)
    sync = loop.attach(model)
    train(loop, sync)
    return [weights(model)]


def gradient_hooks_that_read(loop: Loop) -> Results:
    model = make_model()
    seen: list[int] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.numel()))
    sync = loop.attach(model)
    model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.numel()))
    train(loop, sync)
    return [weights(model), torch.tensor(sorted(seen))]


def optimizer_step_hooks(loop: Loop) -> Results:
    """A hook before the step decays the weights, one after it clamps them."""
    model = make_model()
    sync = loop.attach(model)
    with_hooks = sync.optimizer

    def decay(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:  # Under a parameter server, each rank steps a part of the model.
                    parameter.grad.add_(parameter.detach(), alpha=0.1)

    def clamp(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-0.2, 0.2)

    with_hooks.register_step_pre_hook(decay)
    with_hooks.register_step_post_hook(clamp)
    train(loop, sync)
    return [weights(model)]


def global_module_hooks(loop: Loop) -> Results:
    model = make_model()
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, _, output: output * 1.1 if isinstance(module, nn.Tanh) else None
    )
    try:
        sync = loop.attach(model)
        train(loop, sync)
    finally:
        handle.remove()
    return [weights(model)]


def saved_tensors_hooks(loop: Loop) -> Results:
    """Saved activations are kept in single precision and restored, as for offloading."""
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
            loss_of(sync.model(x), y).backward()
        sync.step()
    return [weights(model)]


@torch.no_grad()
def _scale(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


USAGES = [
    forward_hooks,
    full_backward_hooks,
    tensor_hooks_that_scale,
    tensor_hooks_on_activations,
    gradient_hooks_before_attach,
    gradient_hooks_that_read,
    optimizer_step_hooks,
    global_module_hooks,
    saved_tensors_hooks,
]


test_hooks_have_the_effect_that_they_have_in_one_process, test_the_results_depend_on_synchronisation = usage_tests(
    USAGES, turn=5
)
