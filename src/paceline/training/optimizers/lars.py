"""LARS: SGD with momentum whose step is, layer by layer, a fixed share of the norm of the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.training.optimizers.layers import ParameterList, is_scaled, norms_of, step_of_groups, trust_ratios


class Lars(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling, for large batches of convolutional networks.

    With a large batch and a large learning rate, some layers receive steps that are larger than their weights, and
    training diverges. LARS limits the step of each layer by the norm of its weights w, for a gradient g:

        trust = trust_coefficient · ‖w‖ ÷ (‖g‖ + weight_decay · ‖w‖)
        v ← momentum · v + lr · trust · (g + weight_decay · w)
        w ← w − v

    Biases and the parameters of normalisation layers (those with fewer than two dimensions) are stepped as by plain SGD
    without weight decay. A layer whose weights or gradient are all zero gets trust = 1.

    Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", 2017, algorithm 1.
    """

    def __init__(
        self,
        params: ParameterList,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        trust_coefficient: float = 0.001,
    ) -> None:
        settings = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "trust_coefficient": trust_coefficient,
        }
        super().__init__(params, settings)

    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        return step_of_groups(self, closure, self._update)

    def _update(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        scaled = [position for position, weight in enumerate(weights) if is_scaled(weight)]
        if scaled:
            gradients = list(gradients)
            own = self._scaled([weights[i] for i in scaled], [gradients[i] for i in scaled], group)
            for position, gradient in zip(scaled, own, strict=True):
                gradients[position] = gradient
        directions = list(torch._foreach_mul(gradients, group["lr"]))
        velocities = [self._velocity_of(weight) for weight in weights]
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, directions)
        if group["nesterov"]:
            torch._foreach_add_(directions, velocities, alpha=group["momentum"])
        torch._foreach_sub_(weights, directions if group["nesterov"] else velocities)

    def _velocity_of(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        velocity: Tensor = state["momentum_buffer"]
        return velocity

    @staticmethod
    def _scaled(weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Return the gradients of layers plus the weight decay, each multiplied by its trust ratio."""
        decay = group["weight_decay"]
        norms = norms_of(weights)
        ratios = trust_ratios(norms * group["trust_coefficient"], norms_of(gradients) + norms * decay)
        directions = list(torch._foreach_add(gradients, weights, alpha=decay))
        torch._foreach_mul_(directions, ratios)
        return directions
