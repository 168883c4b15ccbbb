"""Parts that layer-wise optimisers share: which parameters they scale, trust ratios, and a step over all groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

ParameterList = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, nn.Parameter]]
"""Parameters as torch's optimisers accept them."""
Update = Callable[[list[Tensor], list[Tensor], dict[str, Any]], None]
"""Function that updates the weights of one group, given their gradients and the group's settings."""


def is_scaled(weight: Tensor) -> bool:
    """Return whether a parameter is a layer's weight; biases and normalisation parameters have one dimension."""
    return weight.dim() > 1


def norms_of(layers: list[Tensor]) -> Tensor:
    """Return the norms of some tensors of the same dtype, in one tensor."""
    return torch.stack(torch._foreach_norm(layers))


def trust_ratios(norms: Tensor, limits: Tensor) -> tuple[Tensor, ...]:
    """Return the quotient of each pair; 1 where either is zero. Those of all layers are computed together."""
    return torch.where((norms > 0) & (limits > 0), norms / limits, torch.ones_like(norms)).unbind()


@torch.no_grad()
def step_of_groups(optimizer: torch.optim.Optimizer, closure: Any, update: Update) -> Any:
    """Run `update` on the parameters with a gradient, group by group and dtype by dtype; return the closure's loss."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    for group in optimizer.param_groups:
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for weight in group["params"]:
            if weight.grad is not None:
                by_kind.setdefault((weight.dtype, weight.device), []).append(weight)
        for weights in by_kind.values():
            update(weights, [weight.grad for weight in weights if weight.grad is not None], group)
    return loss
