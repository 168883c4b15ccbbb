"""Settings of an optimiser's parameter groups, which schedulers change and workers send to servers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import WorkloadError
from paceline.strategies.base.parameter_groups import PER_PARAMETER_KEYS

_MAX_ITEMS = 16
"""Largest tensor whose numbers are part of the checksum; no setting of torch's optimisers has more than two."""


@dataclass(frozen=True)
class _Setting:
    """One setting of one parameter group, with the value that the optimiser was created with."""

    group: int
    """Number of the group. `load_state_dict` replaces the groups themselves."""
    key: str
    first: Any

    @property
    def count(self) -> int:
        """Number of numbers in it; 0 if it is not numeric."""
        return len(_numbers(self.first))

    def read(self, groups: Sequence[dict[str, Any]]) -> list[float]:
        """Return its numbers; raise a WorkloadError if it is not numeric and has changed."""
        now = groups[self.group].get(self.key)
        numbers = _numbers(now)
        same = bool(numbers) or now is self.first or (isinstance(now, bool | str) and now == self.first)
        if len(numbers) != self.count or not same:
            raise WorkloadError(
                f"the optimiser's {self.key} has changed from {self.first!r} to {now!r}; servers receive only numbers.",
                hint="do not change it during training, or use a strategy without servers, such as `allreduce`",
            )
        return [float(number) for number in numbers]

    def write(self, groups: Sequence[dict[str, Any]], numbers: Sequence[float]) -> None:
        """Set it to the numbers that another rank has read."""
        before = groups[self.group][self.key]
        after = [_like(old, new) for old, new in zip(_numbers(before), numbers, strict=True)]
        if after:
            groups[self.group][self.key] = type(before)(after) if isinstance(before, tuple | list) else after[0]


class OptimizerSettings:
    """Settings that an optimiser was created with, as numbers in the same order on all ranks.

    Settings that schedulers add later for their own use are not included.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        groups = self._optimizer.param_groups
        self._sizes = [len(group["params"]) for group in groups]
        self._settings = [
            _Setting(number, key, group[key])
            for number, group in enumerate(groups)
            for key in group
            if key not in PER_PARAMETER_KEYS
        ]
        self.count = sum(setting.count for setting in self._settings)
        """Number of numbers in all settings."""

    def read(self) -> list[float]:
        """Return the numbers of all settings."""
        groups = self._checked_groups()
        return [number for setting in self._settings for number in setting.read(groups)]

    def checksum(self) -> int:
        """Return a checksum of all settings, also of those that are not numbers: the same on ranks with the same."""
        groups = self._checked_groups()
        values = [_plain(groups[setting.group].get(setting.key)) for setting in self._settings]
        return zlib.crc32(repr(values).encode())

    def write(self, numbers: Sequence[float], updates_per_step: int = 1) -> None:
        """Set all settings to the numbers that another rank has read.

        The learning rate is divided by `updates_per_step`, the number of updates that replace one synchronous step.
        """
        left, groups = list(numbers), self._optimizer.param_groups
        for setting in self._settings:
            own, left = left[: setting.count], left[setting.count :]
            setting.write(groups, [number / updates_per_step for number in own] if setting.key == "lr" else own)

    def _checked_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups; raise if parameters were added or removed: servers do not know of it."""
        groups = self._optimizer.param_groups
        if [len(group["params"]) for group in groups] != self._sizes:
            raise WorkloadError(
                "the optimiser's parameter groups have changed since attach(); servers keep those of attach().",
                hint="create all groups in make_optimizer; to unfreeze parameters, close() and attach() again",
            )
        return groups


def _plain(value: Any) -> Any:
    """Return a value whose representation does not depend on the process."""
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() <= _MAX_ITEMS else None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return value if value is None or isinstance(value, bool | str) else type(value).__name__


def _numbers(value: Any) -> list[Any]:
    """Return the numbers of a setting; an empty list if it is not numeric."""
    parts = list(value) if isinstance(value, tuple | list) else [value]
    return parts if all(_is_number(part) for part in parts) else []


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _like(before: Any, number: float) -> Any:
    """Return the number as the type of `before`; a float if `before` is an int and the number is not whole."""
    if isinstance(before, Tensor):  # A new tensor: the worker's optimiser may share the old one.
        return torch.full_like(before, number)
    return int(number) if isinstance(before, int) and number.is_integer() else number
