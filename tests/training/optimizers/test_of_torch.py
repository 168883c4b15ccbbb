"""SGD and AdamW step as torch's do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline.training.optimizers.of_torch import SGD, AdamW

Kind = Callable[..., torch.optim.Optimizer]


@pytest.mark.parametrize(
    ("own", "other", "settings"),
    [
        (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "fused": True}),
        (SGD, torch.optim.SGD, {"lr": 0.1, "foreach": False}),
        (AdamW, torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1, "fused": True}),
    ],
)
def test_steps_are_those_of_torch(own: Kind, other: Kind, settings: dict[str, object]) -> None:
    weights = [nn.Parameter(torch.randn(3, 4, generator=torch.Generator().manual_seed(0))) for _ in range(2)]
    optimizers = [kind([weight], **settings) for kind, weight in zip((own, other), weights, strict=True)]
    for step in range(3):
        for weight, optimizer in zip(weights, optimizers, strict=True):

            def closure(weight: Tensor = weight, step: int = step) -> Tensor:
                weight.grad = None
                loss = (weight * (step + 1)).square().sum()
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            assert loss is not None
            assert torch.is_grad_enabled()
    assert torch.equal(*weights)
    assert optimizers[0].state_dict().keys() == optimizers[1].state_dict().keys()
    assert type(optimizers[0]).__qualname__ == type(optimizers[1]).__qualname__, "checkpoints have the name"


def test_profiles_name_the_step() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = SGD([weight], lr=0.1)
    weight.grad = torch.ones(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        optimizer.step()
    assert "Optimizer.step#SGD.step" in [event.key for event in profiler.key_averages()]


def test_hooks_of_steps_run() -> None:
    weight, seen = nn.Parameter(torch.ones(2)), []
    optimizer = AdamW([weight], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    weight.grad = torch.ones(2)
    optimizer.step()
    assert seen == [1]
