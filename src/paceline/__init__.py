"""Train PyTorch models data-parallel under every way of synchronising gradients, and compare their speed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.config.recipe import Recipe
    from paceline.strategies.base.strategy import AfterBackward, Strategy
    from paceline.training.attach import attach
    from paceline.training.sync import Sync
    from paceline.workloads.workload import Workload

__all__ = ["AfterBackward", "Recipe", "Strategy", "Sync", "Workload", "attach"]

_HOMES = {
    "AfterBackward": "paceline.strategies.base.strategy",
    "Recipe": "paceline.config.recipe",
    "Strategy": "paceline.strategies.base.strategy",
    "Sync": "paceline.training.sync",
    "Workload": "paceline.workloads.workload",
    "attach": "paceline.training.attach",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `paceline --help` does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
