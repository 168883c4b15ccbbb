"""Tests of optimisers: parameter groups, implementations, learning rates changed by hand, clipping, zero_grad."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from training.usage.loops import (
    STRATEGIES,
    Loop,
    Results,
    loss_of,
    make_model,
    same_in_one_process,
    train,
    usage_tests,
    weights,
)

pytestmark = pytest.mark.takes(6)


def groups_by_name(loop: Loop) -> Results:
    """Weight decay for weights only: `make_optimizer` gets (name, parameter) pairs."""
    model = make_model()

    def make(named: Any) -> torch.optim.Optimizer:
        decayed = [parameter for name, parameter in named if name.endswith("weight")]
        others = [parameter for name, parameter in named if not name.endswith("weight")]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01)

    train(loop, loop.attach(model, make))
    return [weights(model)]


def groups_of_named_pairs(loop: Loop) -> Results:
    model = make_model()

    def make(named: Any) -> torch.optim.Optimizer:
        first = [pair for pair in named if pair[0].startswith("0.")]
        rest = [pair for pair in named if not pair[0].startswith("0.")]
        return torch.optim.SGD([{"params": first, "lr": 0.01}, {"params": rest}], lr=0.1, momentum=0.9)

    train(loop, loop.attach(model, make))
    return [weights(model)]


def groups_from_the_model(loop: Loop) -> Results:
    """`make_optimizer` may ignore its argument and use the model."""
    model = make_model()
    groups = [
        {"params": model[0].parameters(), "lr": 0.05},
        {"params": [*model[2].parameters(), *model[4].parameters()]},
    ]
    train(loop, loop.attach(model, lambda _: torch.optim.SGD(groups, lr=0.1)))
    return [weights(model)]


def parameters_left_out(loop: Loop) -> Results:
    """The optimiser has only a part of the parameters; the others stay as they are."""
    model = make_model()
    sync = loop.attach(model, lambda named: torch.optim.SGD([p for n, p in named if n.startswith("4")], lr=0.1))
    train(loop, sync)
    return [weights(model)]


def parameters_left_out_and_clipping(loop: Loop) -> Results:
    """The norm has the gradients of all parameters of the model, each from one step only."""
    model = make_model()
    sync = loop.attach(model, lambda named: torch.optim.SGD([p for n, p in named if n.startswith("4")], lr=0.1))
    for step, (x, y) in enumerate(loop.batches(6)):
        loss_of(sync.model(x), y).backward()
        sync.step(max_norm=0.1 if step % 3 == 2 else None)
    return [weights(model)]


def group_added_later(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model, lambda named: torch.optim.SGD([p for n, p in named if not n.startswith("0")], lr=0.1))
    train(loop, sync, 2)
    sync.optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
    train(loop, sync, 2, start=2)
    return [weights(model)]


def implementations(loop: Loop) -> Results:
    found = []
    for kind, options in (
        (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.Adam, {"fused": True, "amsgrad": True}),
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.Adadelta, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.Rprop, {}),
        (torch.optim.Adafactor, {}),
    ):
        model = make_model()
        sync = loop.attach(model, lambda named, kind=kind, options=options: kind(named, lr=0.01, **options))
        train(loop, sync, 3)
        found.append(weights(model))
        sync.detach()
        loop.attached.pop()
    return found


def muon(loop: Loop) -> Results:
    """Muon steps matrices only, and orthogonalises each in bfloat16."""
    model = make_model()
    sync = loop.attach(model, lambda named: torch.optim.Muon([pair for pair in named if pair[1].dim() == 2], lr=0.01))
    train(loop, sync, 2)
    return [weights(model)]


def maximise(loop: Loop) -> Results:
    model = make_model()
    train(loop, loop.attach(model, lambda named: torch.optim.SGD(named, lr=0.01, maximize=True)))
    return [weights(model)]


def learning_rate_in_a_tensor(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model, lambda named: torch.optim.SGD(named, lr=torch.tensor(0.1, dtype=torch.float64)))
    for step, (x, y) in enumerate(loop.batches()):
        loss_of(sync.model(x), y).backward()
        sync.step()
        sync.optimizer.param_groups[0]["lr"].fill_(0.1 / (step + 2))
    return [weights(model)]


def learning_rate_by_hand(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    for step, (x, y) in enumerate(loop.batches()):
        for group in sync.optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        loss_of(sync.model(x), y).backward()
        sync.step()
        sync.optimizer.param_groups[0]["momentum"] = 0.5
    return [weights(model)]


def clipping(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        loss_of(sync.model(x), y).backward()
        sync.step(max_norm=0.05)
    return [weights(model)]


def zero_grad_habits(loop: Loop) -> Results:
    found = []
    for before, to_none in ((True, True), (True, False), (False, True), (False, False)):
        model = make_model()
        sync = loop.attach(model)
        for x, y in loop.batches():
            if before:
                sync.optimizer.zero_grad(set_to_none=to_none)
            loss_of(sync.model(x), y).backward()
            sync.step()
            if not before:
                sync.model.zero_grad(set_to_none=to_none)
        found.append(weights(model))
        sync.detach()
        loop.attached.pop()
    return found


def zero_grad_between_forward_and_backward(loop: Loop) -> Results:
    """The order of many tutorials."""
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        loss = loss_of(sync.model(x), y)
        sync.optimizer.zero_grad()
        loss.backward()
        sync.step()
    return [weights(model)]


def reading_gradients(loop: Loop) -> Results:
    """Gradients may be read before the step; they are this rank's own, or the mean."""
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        loss_of(sync.model(x), y).backward()
        assert all(float(p.grad.norm()) > 0 for p in model.parameters())
        torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        sync.step()
    return [weights(model)]


def own_optimizer(loop: Loop) -> Results:
    """A user's own class of optimiser, with its own state."""
    model = make_model()
    train(loop, loop.attach(model, lambda named: Sign(named, {"lr": 0.01})))
    return [weights(model)]


class Sign(torch.optim.Optimizer):
    """Optimiser that moves each weight by a fixed length, in the direction of a running mean."""

    @torch.no_grad()
    def step(self, _: Any = None) -> None:  # type: ignore[override]
        """Step each parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 0.5)
                    parameter.sub_(mean.sign(), alpha=group["lr"])


USAGES = [
    groups_by_name,
    groups_of_named_pairs,
    groups_from_the_model,
    parameters_left_out,
    parameters_left_out_and_clipping,
    implementations,
    muon,
    maximise,
    learning_rate_in_a_tensor,
    learning_rate_by_hand,
    clipping,
    zero_grad_habits,
    zero_grad_between_forward_and_backward,
    reading_gradients,
    own_optimizer,
]


test_optimisers_step_as_in_one_process, test_the_results_depend_on_synchronisation = usage_tests(USAGES, turn=10)


# Servers keep the groups of `attach`.
test_a_group_that_is_added_later = same_in_one_process(
    [group_added_later], turn=9, strategies=[text for text in STRATEGIES if not text.startswith("parameter_server")]
)
