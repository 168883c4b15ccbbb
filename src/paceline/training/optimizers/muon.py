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
    learning rate and one weight decay, those of AdamW, serve both.

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
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(params, settings)

    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        return step_of_groups(self, closure, self._update)

    def _update(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        others: tuple[list[Tensor], list[Tensor]] = [], []
        for weight, gradient in zip(weights, gradients, strict=True):
            if is_scaled(weight):
                self._update_layer(weight, gradient, group)
            else:
                others[0].append(weight)
                others[1].append(gradient)
        if others[0]:
            steps = adam_steps(self, *others, group)
            torch._foreach_sub_(others[0], torch._foreach_mul(steps, group["lr"]))

    def _update_layer(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        matrix = gradient.lerp(mean, group["momentum"]).reshape(len(weight), -1)
        factor = RMS * math.sqrt(max(matrix.shape))
        weight.sub_(orthogonalise(matrix).view_as(weight).to(weight.dtype) * (group["lr"] * factor))


def orthogonalise(matrix: Tensor) -> Tensor:
    """Return a matrix with the same singular vectors and singular values near 1, in bfloat16."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    x: Tensor = (matrix.T if is_tall else matrix).bfloat16()
    x = x / x.norm().clamp(min=1e-7)  # The iteration needs singular values of at most 1.
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x
