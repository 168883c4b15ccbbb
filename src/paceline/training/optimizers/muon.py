"""Muon: momentum whose step is made orthogonal for every layer, with AdamW for all other parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paceline.training.optimizers.adam import adam_steps
from paceline.training.optimizers.layers import ParameterList, is_scaled, step_of_groups

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the Newton–Schulz iteration, from the source below."""
ITERATIONS = 5
"""Iterations by default. With 3, which take less time, singular values are further from 1."""
RMS = 0.2
"""Root mean square of a step of AdamW, which the step of a layer is scaled to (Liu et al., section 2.2)."""


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by a Newton–Schulz iteration, so that all directions of a layer learn equally fast.

    A layer's weights are read as a matrix: output channels × everything else. Torch's own Muon accepts matrices only,
    so it can train neither convolutions nor biases. For a gradient g and momentum μ:

        m ← μ · m + (1 − μ) · g
        u = orthogonalise(μ · m + (1 − μ) · g)             the nearest matrix with singular values near 1
        w ← (1 − lr · weight_decay) · w − lr · 0.2 · √max(rows, columns) · u

    The factor gives u the size of a step of AdamW, which updates the parameters with fewer than two dimensions. So one
    learning rate and one weight decay, those of AdamW, serve both. A parameter group with `orthogonal=False` is updated
    by AdamW as a whole, as is usual for the first and the last layer of a network.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; the factor: Liu et al.,
    "Muon is Scalable for LLM Training", 2025.
    """

    def __init__(
        self,
        params: ParameterList,
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        *,
        orthogonal: bool = True,
        iterations: int = ITERATIONS,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        settings = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "orthogonal": orthogonal,
            "iterations": iterations,
            "betas": betas,
            "eps": eps,
        }
        super().__init__(params, settings)

    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        return step_of_groups(self, closure, self._update)

    def _update(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        pairs = list(zip(weights, gradients, strict=True))
        layers = [pair for pair in pairs if group["orthogonal"] and is_scaled(pair[0])]
        others = [pair for pair in pairs if not (group["orthogonal"] and is_scaled(pair[0]))]
        if layers:
            self._update_layers([weight for weight, _ in layers], [gradient for _, gradient in layers], group)
        if others:
            own = [weight for weight, _ in others]
            steps = adam_steps(self, own, [gradient for _, gradient in others], group)
            torch._foreach_sub_(own, torch._foreach_mul(steps, group["lr"]))

    def _update_layers(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        means = [self._mean_of(weight) for weight in weights]
        torch._foreach_lerp_(means, gradients, 1 - group["momentum"])
        matrices = [one.reshape(len(one), -1) for one in torch._foreach_lerp(gradients, means, group["momentum"])]
        steps = [
            orthogonalise(matrix, group["iterations"]).view_as(weight).to(weight.dtype)
            for matrix, weight in zip(matrices, weights, strict=True)
        ]
        torch._foreach_mul_(steps, [RMS * math.sqrt(max(matrix.shape)) for matrix in matrices])
        torch._foreach_mul_(steps, group["lr"])
        torch._foreach_sub_(weights, steps)

    def _mean_of(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        mean: Tensor = state["momentum_buffer"]
        return mean


def orthogonalise(matrix: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """Return a matrix with the same singular vectors and singular values near 1, in bfloat16."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    x: Tensor = (matrix.T if is_tall else matrix).bfloat16()
    x = x / x.norm().clamp(min=1e-7)  # The iteration needs singular values of at most 1.
    for _ in range(iterations):
        gram = x @ x.T
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)  # b · gram + c · gram²
        x = torch.addmm(x, gram, x, beta=a)
    return x.T if is_tall else x
