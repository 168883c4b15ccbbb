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
AttributePath = tuple[str, str]
"""Path of a module, or number of a state of the optimiser, and the name of an attribute in it."""


class HostState:
    """Random number generators of the host, and numbers and tensors that the model and the optimiser keep."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        """Keep the state of a step on `device`, whose own generator graphs advance."""
        self._random = RandomState.current()
        self._device = device
        kept_by_model, kept_by_optimizer = dict(_kept_by_model(model)), dict(_kept_by_optimizer(optimizer))
        self._of_model, self._of_optimizer = _numbers_in(kept_by_model), _numbers_in(kept_by_optimizer)
        self._tensors_of_model, self._tensors_of_optimizer = _tensors_in(kept_by_model), _tensors_in(kept_by_optimizer)

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


def _kept_by_model(model: nn.Module) -> Iterator[tuple[AttributePath, Any]]:
    """Yield the plain attributes and the buffers of all modules, each with its place."""
    for path, module in model.named_modules():
        for name, value in {**vars(module), **module._buffers}.items():
            yield (path, name), value


def _kept_by_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[tuple[AttributePath, Any]]:
    """Yield the plain attributes and the state of the optimiser, each with its place."""
    for name, value in vars(optimizer).items():
        yield ("", name), value
    for number, state in enumerate(optimizer.state.values()):
        for name, value in state.items() if isinstance(state, Mapping) else ():
            yield (str(number), str(name)), value


def _numbers_in(kept: Mapping[AttributePath, Any]) -> dict[AttributePath, float]:
    return {
        place: value for place, value in kept.items() if isinstance(value, int | float) and place[1] not in NOT_COUNTED
    }


def _tensors_in(kept: Mapping[AttributePath, Any]) -> dict[AttributePath, Tensor]:
    """Return the tensors, except outputs that are kept with their autograd graph: steps do not read them again."""
    return {place: value for place, value in kept.items() if isinstance(value, Tensor) and not value.requires_grad}


def _changed(before: dict[AttributePath, float], after: dict[AttributePath, float]) -> AttributePath | None:
    """Return the place of the first number that differs, or that exists on one side only."""
    for place in {**before, **after}:
        one, two = before.get(place), after.get(place)
        if one != two and not (one != one and two != two):  # NaN is equal to NaN here.
            return place
    return None


def _replaced(before: dict[AttributePath, Tensor], after: dict[AttributePath, Tensor]) -> AttributePath | None:
    """Return the place of the first tensor that is another object, or that exists on one side only."""
    return next((place for place in {**before, **after} if before.get(place) is not after.get(place)), None)
