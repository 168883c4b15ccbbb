"""Trial of graphs: a few steps are trained without them, then again with them from the same state, and compared.

Python code does not run again in a replay. A model that chooses its path by a random number, or an optimiser that
counts its steps in Python, would be captured without an error and train wrongly. Their losses or weights differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.messages.nested_tensors import tensors_in
from paceline.config import Precision
from paceline.workloads.batches import MicroBatch
from paceline.workloads.random_state import random_state_info, restore_random_state

STEPS = 3
"""Steps of a trial."""


@dataclass(frozen=True)
class Tolerance:
    """Largest differences that rounding explains."""

    loss: float
    """Of a loss, relative to it."""
    update: float
    """Of the change of all weights, relative to that change."""


TOLERANCES: dict[Precision | None, Tolerance] = {
    "fp64": Tolerance(1e-6, 1e-4),  # The learning rate is float32 in a graph.
    "fp32": Tolerance(1e-3, 0.05),  # Muon's orthogonal updates amplify rounding: 2% was measured.
    None: Tolerance(1e-3, 0.05),
    "bf16": Tolerance(0.02, 0.2),  # Muon: 10% was measured.
}
"""Tolerances by precision. Sums of kernels with atomic additions differ from run to run, and bfloat16 has 8 bits."""


class Snapshot:
    """Values of tensors on the device, and the states of the random number generators."""

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        self._device = device
        self._tensors = list(tensors)
        self._values = [tensor.detach().clone() for tensor in self._tensors]
        self._random = random_state_info(device)

    def restore(self) -> None:
        """Set the same tensors to these values, in place: graphs contain their addresses."""
        with torch.no_grad():
            for tensor, value in zip(self._tensors, self._values, strict=True):
                tensor.detach().copy_(value)
        restore_random_state(self._random, self._device)


def tensors_that_passes_change(model: nn.Module) -> list[Tensor]:
    """Return the buffers, and the tensors that modules keep as plain attributes, such as running means."""
    plain = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    return [*model.buffers(), *[tensor for tensor in plain if not tensor.requires_grad]]


def tensors_that_steps_change(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all tensors that training changes."""
    return [*model.parameters(), *tensors_that_passes_change(model), *tensors_in(list(optimizer.state.values()))]


@dataclass
class TrialStep:
    """Step that was trained without graphs."""

    settings: list[dict[str, Any]]
    """Learning rate and other settings of each parameter group."""
    passes: list[tuple[MicroBatch, Any]] = field(default_factory=list)
    """Micro-batches with their fetched batches."""
    losses: list[Tensor] = field(default_factory=list)
    """Loss of each micro-batch."""


@torch.no_grad()
def difference_of_losses(ours: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the largest relative difference; infinite if one of them is not finite."""
    one, two = (torch.stack([loss.detach().double().cpu() for loss in losses]) for losses in (ours, others))
    difference = float(((one - two).abs() / two.abs().clamp(min=1e-6)).max())
    return difference if difference == difference else float("inf")


@torch.no_grad()
def difference_of_updates(before: Sequence[Tensor], eager: Sequence[Tensor], graphed: Sequence[Tensor]) -> float:
    """Return the norm of the difference of two changes of the weights, relative to the first change."""
    change = sum(float((after - start).double().square().sum()) for start, after in zip(before, eager, strict=True))
    between = sum(float((one - two).double().square().sum()) for one, two in zip(eager, graphed, strict=True))
    return (between / change) ** 0.5 if change else (0.0 if between == 0 else float("inf"))
