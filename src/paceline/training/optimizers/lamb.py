"""LAMB: Adam whose step is, layer by layer, as large as the norm of the weights times the learning rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.training.optimizers.adam import adam_steps
from paceline.training.optimizers.layers import ParameterList, is_scaled, norms_of, step_of_groups, trust_ratios


class Lamb(torch.optim.Optimizer):
    """Layer-wise adaptive moments for batch training, for large batches of transformers and convolutional networks.

    With Adam's moments m̂ and v̂, bias-corrected, of the gradient of a layer with weights w:

        r = m̂ ÷ (√v̂ + eps) + weight_decay · w
        w ← w − lr · ‖w‖ ÷ ‖r‖ · r

    Biases and the parameters of normalisation layers (those with fewer than two dimensions) are stepped as by Adam,
    without weight decay. A layer whose weights or step are all zero is not scaled.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020,
    algorithm 2, with the identity as the scaling function.
    """

    def __init__(
        self,
        params: ParameterList,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        return step_of_groups(self, closure, self._update)

    def _update(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        steps = adam_steps(self, weights, gradients, group)
        scaled = [position for position, weight in enumerate(weights) if is_scaled(weight)]
        if scaled:
            layers, own = [weights[i] for i in scaled], [steps[i] for i in scaled]
            torch._foreach_add_(own, layers, alpha=group["weight_decay"])
            torch._foreach_mul_(own, trust_ratios(norms_of(layers), norms_of(own)))
        torch._foreach_mul_(steps, group["lr"])
        torch._foreach_sub_(weights, steps)
