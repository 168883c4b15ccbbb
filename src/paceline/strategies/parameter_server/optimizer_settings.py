"""The numbers that an optimiser's groups are set to: what schedulers change, and servers have to hear of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import WorkloadError

NOT_SET = frozenset({"params", "param_names"})
"""What a group has besides settings."""


@dataclass(frozen=True)
class _Setting:
    """One setting of one group, as the optimiser was made with it."""

    group: dict[str, Any]
    key: str
    first: Any

    @property
    def count(self) -> int:
        """How many numbers it is."""
        return len(_numbers(self.first))

    def read(self) -> list[float]:
        """Its numbers; an error for what is none and has changed."""
        now = self.group.get(self.key)
        numbers = _numbers(now)
        same = bool(numbers) or now is self.first or (isinstance(now, bool | str) and now == self.first)
        if len(numbers) != self.count or not same:
            raise WorkloadError(
                f"the optimiser's {self.key} has changed from {self.first!r} to {now!r}, which servers do not hear of.",
                hint="leave it as it is, or use a strategy whose ranks step their own weights, as `allreduce`",
            )
        return [float(number) for number in numbers]

    def write(self, numbers: Sequence[float]) -> None:
        """Sets it to what another rank has read."""
        before = self.group[self.key]
        after = [_like(old, new) for old, new in zip(_numbers(before), numbers, strict=True)]
        if after:
            self.group[self.key] = type(before)(after) if isinstance(before, tuple | list) else after[0]


class OptimizerSettings:
    """The settings that an optimiser was made with, its numbers in one order on all ranks.

    What schedulers add for themselves later is none of them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        groups = optimizer.param_groups
        self._all = [_Setting(group, key, group[key]) for group in groups for key in group if key not in NOT_SET]
        self.count = sum(setting.count for setting in self._all)
        """How many numbers there are."""

    def read(self) -> list[float]:
        """All numbers."""
        return [number for setting in self._all for number in setting.read()]

    def write(self, numbers: Sequence[float], updates_per_step: int = 1) -> None:
        """Sets them to what another rank has read, for as many updates as go as far as a step of its own."""
        left = list(numbers)
        for setting in self._all:
            own, left = left[: setting.count], left[setting.count :]
            setting.write([number / updates_per_step for number in own] if setting.key == "lr" else own)


def _numbers(value: Any) -> list[Any]:
    """The numbers that a setting consists of; none where it is something else."""
    parts = list(value) if isinstance(value, tuple | list) else [value]
    return parts if all(_is_number(part) for part in parts) else []


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _like(before: Any, number: float) -> Any:
    """A number of the same kind; but a whole one that is set to a part becomes that."""
    if isinstance(before, Tensor):  # A new one: the worker's optimiser may share the old.
        return torch.full_like(before, number)
    return int(number) if isinstance(before, int) and number.is_integer() else number
