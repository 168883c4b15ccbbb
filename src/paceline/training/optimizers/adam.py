"""The step of Adam, which LAMB scales by layer, and which Muon uses where it does not apply itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def adam_steps(
    optimizer: torch.optim.Optimizer, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]
) -> list[Tensor]:
    """Update the moments in the optimiser's state; return m̂ ÷ (√v̂ + eps) for each parameter."""
    states = [_state_of(optimizer, weight) for weight in weights]
    counts, means, squares = ([state[key] for state in states] for key in ("step", "exp_avg", "exp_avg_sq"))
    first, second = group["betas"]
    torch._foreach_add_(counts, 1)
    torch._foreach_lerp_(means, gradients, 1 - first)
    torch._foreach_mul_(squares, second)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
    # With bias corrections a and b, (m ÷ a) ÷ (√(v ÷ b) + eps) = m ÷ (eps · a + √v · a ÷ √b). They are computed as
    # vectors over the parameters, so that only the sum in brackets takes a kernel per parameter.
    steps = torch.stack(counts)
    of_means, of_squares = 1 - first**steps, 1 - second**steps
    dtype = weights[0].dtype
    offsets = (group["eps"] * of_means).to(dtype).unbind()
    factors = (of_means / of_squares.sqrt()).to(dtype).unbind()
    roots = torch._foreach_sqrt(squares)
    return list(torch._foreach_div(means, torch._foreach_addcmul(offsets, roots, factors)))


def _state_of(optimizer: torch.optim.Optimizer, weight: Tensor) -> dict[str, Any]:
    state: dict[str, Any] = optimizer.state[weight]
    if not state:
        # The count is on the device, so that a CUDA graph can increase it; in float64 powers of it are exact enough.
        state["step"] = torch.zeros((), dtype=torch.float64, device=weight.device)
        state["exp_avg"] = torch.zeros_like(weight)
        state["exp_avg_sq"] = torch.zeros_like(weight)
    return state
