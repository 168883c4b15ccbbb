"""Description of a run's strategy, placement and model, for its configuration line and its record."""

from __future__ import annotations

from typing import Any

from torch import nn

from paceline.measure.cores import usable_cores
from paceline.strategies.base.strategy import Strategy
from paceline.training.placement import Placement


def describe_strategy(text: str, strategy: Strategy) -> dict[str, Any]:
    """Return the properties of a strategy, under the name that the user wrote."""
    return {
        "strategy": text,
        "lossless": strategy.lossless,
        "exchanges": strategy.exchanges,
        "lockstep": strategy.lockstep,
        "sends": strategy.sends,
    }


def describe_placement(placement: Placement, *, interface: str) -> dict[str, Any]:
    """Return a rank's device, backend, network interface, threads and cores."""
    return {
        "device": placement.device_name,
        "backend": placement.backend,
        "interface": interface,
        "threads": placement.threads,
        "cores": usable_cores(),
    }


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Return the size of a model and the number of its BatchNorm and dropout layers."""
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad),
        "batch_norm_layers": sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()),
        "random_layers": sum(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules()),
    }
