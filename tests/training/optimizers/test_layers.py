"""Optimisers that torch does not have, against their formulas in plain Python and against torch's own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from device_operations import kernels_of
from paceline.training.optimizers.lamb import Lamb
from paceline.training.optimizers.lars import Lars
from paceline.training.optimizers.muon import Muon, orthogonalise

STEPS = 4
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lars": lambda p: Lars(p, lr=0.3, momentum=0.8, weight_decay=0.01, trust_coefficient=0.02),
    "nesterov": lambda p: Lars(p, lr=0.3, momentum=0.8, weight_decay=0.01, trust_coefficient=0.02, nesterov=True),
    "lamb": lambda p: Lamb(p, lr=0.01, weight_decay=0.1),
    "muon": lambda p: Muon(p, lr=0.01, weight_decay=0.1),
}


def layer_and_bias() -> tuple[nn.Parameter, nn.Parameter]:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(5, 3, dtype=torch.float64)), nn.Parameter(torch.randn(5, dtype=torch.float64))


def train(
    make: Callable[[Any], torch.optim.Optimizer], weights: tuple[nn.Parameter, ...]
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Step on random gradients; return the gradients of each step and the weights at the end."""
    optimizer, seen = make(list(weights)), []
    for _ in range(STEPS):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        seen.append([weight.grad.clone() for weight in weights if weight.grad is not None])
        optimizer.step()
    return seen, [weight.detach().clone() for weight in weights]


def norm(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values))


def lars_by_formula(w: list[float], gradients: list[list[float]], *, layer: bool, nesterov: bool) -> list[float]:
    v = [0.0] * len(w)
    for g in gradients:
        decay = 0.01 if layer else 0.0
        trust = 0.02 * norm(w) / (norm(g) + decay * norm(w)) if layer else 1.0
        step = [0.3 * trust * (gi + decay * wi) for gi, wi in zip(g, w, strict=True)]
        v = [0.8 * vi + si for vi, si in zip(v, step, strict=True)]
        moved = [si + 0.8 * vi for si, vi in zip(step, v, strict=True)] if nesterov else v
        w = [wi - mi for wi, mi in zip(w, moved, strict=True)]
    return w


def lamb_by_formula(w: list[float], gradients: list[list[float]], *, layer: bool) -> list[float]:
    m, v = [0.0] * len(w), [0.0] * len(w)
    for t, g in enumerate(gradients, start=1):
        m = [0.9 * mi + 0.1 * gi for mi, gi in zip(m, g, strict=True)]
        v = [0.999 * vi + 0.001 * gi * gi for vi, gi in zip(v, g, strict=True)]
        r = [(mi / (1 - 0.9**t)) / (math.sqrt(vi / (1 - 0.999**t)) + 1e-6) for mi, vi in zip(m, v, strict=True)]
        if layer:
            r = [ri + 0.1 * wi for ri, wi in zip(r, w, strict=True)]
            r = [norm(w) / norm(r) * ri for ri in r]
        w = [wi - 0.01 * ri for wi, ri in zip(w, r, strict=True)]
    return w


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_follows_its_formula(nesterov: bool) -> None:
    weights = layer_and_bias()
    before = [weight.detach().flatten().tolist() for weight in weights]
    seen, after = train(MAKERS["nesterov" if nesterov else "lars"], weights)
    for index, layer in enumerate([True, False]):
        gradients = [step[index].flatten().tolist() for step in seen]
        expected = lars_by_formula(before[index], gradients, layer=layer, nesterov=nesterov)
        assert after[index].flatten().tolist() == pytest.approx(expected, rel=1e-12)


def test_lars_without_scaling_is_sgd() -> None:
    own, other = layer_and_bias()[1], layer_and_bias()[1]
    torch.manual_seed(1)
    _, after = train(lambda p: Lars(p, lr=0.1, momentum=0.9, nesterov=True), (own,))
    torch.manual_seed(1)
    _, expected = train(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), (other,))
    torch.testing.assert_close(after[0], expected[0], rtol=1e-12, atol=0)


def test_lamb_follows_its_formula() -> None:
    weights = layer_and_bias()
    before = [weight.detach().flatten().tolist() for weight in weights]
    seen, after = train(MAKERS["lamb"], weights)
    for index, layer in enumerate([True, False]):
        gradients = [step[index].flatten().tolist() for step in seen]
        expected = lamb_by_formula(before[index], gradients, layer=layer)
        assert after[index].flatten().tolist() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("make", [MAKERS["lamb"], MAKERS["muon"]], ids=["lamb", "muon"])
def test_parameters_without_layers_are_stepped_as_by_adamw(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    own, other = layer_and_bias()[1], layer_and_bias()[1]
    decay, eps = (0.0, 1e-6) if make is MAKERS["lamb"] else (0.1, 1e-8)
    torch.manual_seed(1)
    _, after = train(make, (own,))
    torch.manual_seed(1)
    _, expected = train(lambda p: torch.optim.AdamW(p, lr=0.01, eps=eps, weight_decay=decay), (other,))
    torch.testing.assert_close(after[0], expected[0], rtol=1e-9, atol=0)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_muon_steps_matrices_as_torch_does(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    own = nn.Parameter(torch.randn(shape))
    other = nn.Parameter(own.detach().clone())
    torch.manual_seed(1)
    _, after = train(lambda p: Muon(p, lr=0.02, weight_decay=0.1), (own,))
    torch.manual_seed(1)
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
    _, expected = train(lambda p: torch.optim.Muon(p, **settings), (other,))
    torch.testing.assert_close(after[0], expected[0], rtol=0, atol=2e-3)  # Both iterate in bfloat16.


def test_muon_leaves_a_group_that_is_not_orthogonal_to_adamw() -> None:
    (own, bias), (other, other_bias) = layer_and_bias(), layer_and_bias()
    torch.manual_seed(1)
    groups = [{"params": [own], "orthogonal": False}, {"params": [bias]}]
    _, after = train(lambda _: Muon(groups, lr=0.01, weight_decay=0.1), (own, bias))
    torch.manual_seed(1)
    _, expected = train(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1), (other, other_bias))
    for one, two in zip(after, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=0)


def test_more_iterations_bring_singular_values_nearer_to_one() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(32, 48)
    spread = [float(torch.linalg.svdvals(orthogonalise(matrix, count).float()).std()) for count in (1, 3, 5)]
    assert spread == sorted(spread, reverse=True)


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in [(64, 27), (27, 64), (32, 32)]:
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)).float())
        assert 0.3 < float(values.min()) <= float(values.max()) < 1.4


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_convolutions_and_layers_of_zeros(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    convolution, zeros = nn.Parameter(torch.randn(8, 3, 3, 3)), nn.Parameter(torch.zeros(4, 2))
    unused = nn.Parameter(torch.ones(2, 2))
    optimizer = make([convolution, zeros, unused])
    before = convolution.detach().clone()
    convolution.grad, zeros.grad = torch.randn_like(convolution), torch.zeros(4, 2)
    optimizer.step()
    assert torch.isfinite(convolution).all()
    assert not torch.equal(convolution, before)
    assert torch.equal(zeros, torch.zeros(4, 2)), "no direction is known, so the weights stay"
    assert torch.equal(unused, torch.ones(2, 2))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_parameters_may_be_stepped_apart(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Strategies step the optimiser on parts of the model; the result must be the same."""
    whole, parts = layer_and_bias(), layer_and_bias()
    torch.manual_seed(1)
    _, expected = train(make, whole)
    torch.manual_seed(1)
    optimizer = make(list(parts))
    for _ in range(STEPS):
        gradients = [torch.randn_like(weight) for weight in parts]
        for weight, gradient in zip(parts, gradients, strict=True):
            weight.grad = gradient
            optimizer.step()
            weight.grad = None
    for weight, other in zip(parts, expected, strict=True):
        torch.testing.assert_close(weight.detach(), other, rtol=1e-12, atol=0)


def layers_and_others(layers: int) -> list[nn.Parameter]:
    """Return the parameters of layers of the same shape, each with a bias and two parameters of a normalisation."""
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for _ in range(layers) for shape in [(8, 4, 3, 3), (8,), (8,), (8,)]]


@pytest.mark.parametrize("rate", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
@pytest.mark.parametrize(
    ("name", "layer", "other"), [("lars", 1, 0), ("nesterov", 1, 0), ("lamb", 2, 1), ("muon", 22, 1)]
)
def test_a_step_starts_few_kernels_and_waits_for_none(name: str, layer: int, other: int, rate: float | Tensor) -> None:
    """`layer` and `other` are the kernels of a parameter; all others process many parameters at once."""
    few, many = (stepped(name, layers, rate) for layers in (3, 12))
    assert many - few <= 9 * (layer + 3 * other), "9 layers more"
    assert many <= 12 * (layer + 3 * other) + 35


def stepped(name: str, layers: int, rate: float | Tensor) -> int:
    """Return the kernels of the second step; check that it is the same for a learning rate in a tensor."""
    expected, weights = layers_and_others(layers), layers_and_others(layers)
    before, optimizer = (MAKERS[name](parameters) for parameters in (expected, weights))
    before.param_groups[0]["lr"], optimizer.param_groups[0]["lr"] = float(rate), rate
    kernels = 0
    for _ in range(2):
        for own, other in zip(weights, expected, strict=True):
            own.grad = torch.randn_like(own)
            other.grad = own.grad.clone()
        before.step()
        kernels = kernels_of(optimizer.step).total()
    for own, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-7)
    return kernels


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_state_can_be_saved_and_loaded(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    first, second = layer_and_bias(), layer_and_bias()
    one = make(list(first))
    for weight in first:
        weight.grad = torch.ones_like(weight)
    one.step()
    other = make(list(second))
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for own, copied in zip(first, second, strict=True):
        copied.data.copy_(own.data)
        own.grad = copied.grad = torch.full_like(own, 0.5)
    one.step()
    other.step()
    for own, copied in zip(first, second, strict=True):
        assert torch.equal(own, copied)
