"""State that Python code changes while it trains, which a graph does not change.

A graph repeats kernels on the same tensors. A layer that is skipped by chance, a schedule inside the model, or a count
of steps would stay as they were when the graph was captured, and a tensor that takes the place of another would never
be read. So a step that changes such a state is not captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.workloads.random_state import RandomState

NOT_COUNTED = frozenset({"training", "lr", "initial_lr", "_opt_called"})
"""Numbers that change without an effect on what a step computes, and the learning rate, which graphs read anew."""
NamedTensors = dict[tuple[str, str], Tensor]
NamedNumbers = dict[tuple[str, str], float]


class HostState:
    """Random number generators of the host, and numbers and tensors that the model and the optimiser keep."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        """Keep the state of a step on `device`, whose own generator graphs advance."""
        self._random = RandomState.current()
        self._device = device
        self._of_model = dict(_numbers_of_model(model))
        self._of_optimizer = dict(_numbers_of_optimizer(optimizer))
        self._tensors_of_model = dict(_tensors_of_model(model))
        self._tensors_of_optimizer = dict(_tensors_of_optimizer(optimizer))

    def why_not_captured(self, after: HostState) -> str:
        """Return why a pass that left the state `after` cannot be a graph, as the end of a sentence; "" if it can."""
        if not self._has_same_generators(after):
            return "the model draws random numbers on the host, which a graph does not draw anew."
        changed = _changed(self._of_model, after._of_model)
        if changed is not None:
            module, name = changed
            where = f"`{module}`" if module else "the model"
            return f"{where} changes its attribute `{name}` in Python, which a graph does not run."
        if _changed(self._of_optimizer, after._of_optimizer) is not None:
            return "the optimiser counts its steps in Python, which a graph does not run."
        replaced = _replaced(self._tensors_of_model, after._tensors_of_model)
        if replaced is not None:
            module, name = replaced
            where = f"`{module}`" if module else "the model"
            return f"{where} replaces its tensor `{name}` by another one, but a graph reads the first."
        if _replaced(self._tensors_of_optimizer, after._tensors_of_optimizer) is not None:
            return "the optimiser replaces tensors of its state by others, but a graph reads the first."
        return ""

    def _has_same_generators(self, after: HostState) -> bool:
        one, two = self._random, after._random
        keys = one.numpy["state"]["key"], two.numpy["state"]["key"]
        return (
            one.python == two.python
            and one.numpy["state"]["pos"] == two.numpy["state"]["pos"]
            and bool((keys[0] == keys[1]).all())
            and (self._device.type == "cpu" or torch.equal(one.torch_cpu, two.torch_cpu))
        )


def _numbers_of_model(model: nn.Module) -> Iterator[tuple[tuple[str, str], float]]:
    for path, module in model.named_modules():
        for name, value in _numbers_in(vars(module)):
            yield (path, name), value


def _numbers_of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[tuple[tuple[str, str], float]]:
    for name, value in _numbers_in(vars(optimizer)):
        yield ("", name), value
    for number, state in enumerate(optimizer.state.values()):
        if isinstance(state, Mapping):
            for name, value in _numbers_in(state):
                yield (str(number), name), value


def _tensors_of_model(model: nn.Module) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yield the buffers, and tensors in plain attributes except outputs that are kept with their autograd graph."""
    for path, module in model.named_modules():
        for name, value in {**vars(module), **module._buffers}.items():
            if isinstance(value, Tensor) and not value.requires_grad:
                yield (path, name), value


def _tensors_of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[tuple[tuple[str, str], Tensor]]:
    for number, state in enumerate(optimizer.state.values()):
        for name, value in state.items() if isinstance(state, Mapping) else ():
            if isinstance(value, Tensor):
                yield (str(number), str(name)), value


def _replaced(before: NamedTensors, after: NamedTensors) -> tuple[str, str] | None:
    """Return the first tensor that is another object, or that exists on one side only."""
    return next((key for key in {**before, **after} if before.get(key) is not after.get(key)), None)


def _numbers_in(values: Mapping[Any, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, int | float) and name not in NOT_COUNTED:
            yield str(name), value


def _changed(before: NamedNumbers, after: NamedNumbers) -> tuple[str, str] | None:
    """Return the first number that differs, or that exists on one side only."""
    for key in {**before, **after}:
        one, two = before.get(key), after.get(key)
        if one != two and not (one != one and two != two):  # NaN is equal to NaN here.
            return key
    return None
