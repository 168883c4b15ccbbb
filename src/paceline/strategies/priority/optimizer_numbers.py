"""Numbers that an optimiser keeps for all parameters together: a step in parts would lose or repeat their changes.

Torch's own optimisers count steps for each parameter, in `optimizer.state`, so each part of a step finds its own
count. Others count in the parameter group (`group["k"] += 1`) or in an attribute (`self.steps += 1`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Numbers = dict[str, list[Any]]
"""Numbers by name, with one entry for each parameter group that has it."""


def numbers_of(optimizer: torch.optim.Optimizer) -> Numbers:
    """Return the numbers among the optimiser's attributes and the settings of its groups."""
    found: Numbers = {f"self.{key}": [value] for key, value in vars(optimizer).items() if type(value) in (int, float)}
    for group in optimizer.param_groups:
        for key, value in group.items():
            if isinstance(value, Tensor):
                found.setdefault(f'group["{key}"]', []).append((id(value), value._version))
            elif type(value) in (int, float):
                found.setdefault(f'group["{key}"]', []).append(value)
    return found


def changed_number(before: Numbers, after: Numbers) -> str | None:
    """Return the name of a number that has changed; None if there is none. A number that is new has not changed."""
    return next((name for name, values in before.items() if after.get(name, values) != values), None)
