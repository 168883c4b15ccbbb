"""Graph of the update: clipping and the step of the optimiser, with the learning rate as a tensor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from paceline.comm.messages.nested_tensors import tensors_in
from paceline.strategies.base.optimizer_state import IMPLEMENTATION
from paceline.training.graphs.capture import CaptureError, Capturer, Replay, capturing
from paceline.training.optimizers.of_torch import SGD

MOST_GRAPHS = 4
"""Most graphs of updates. They differ in settings of the optimiser; one whose settings always change has none."""
NOT_SETTINGS = frozenset({"params", "lr", "param_names", "initial_lr"})


class UpdateGraphs:
    """Updates of one optimiser as graphs, each for certain settings.

    A graph contains the numbers that were captured. So the learning rate is a tensor while it is captured, into which
    the present one is copied before a replay. `param_groups` keep theirs as a number, for schedulers and checkpoints.
    """

    def __init__(
        self, capturer: Capturer, optimizer: torch.optim.Optimizer, update: Callable[[float | None], None]
    ) -> None:
        """Capture calls of `update`, which clips gradients to a norm and steps `optimizer`."""
        self._capturer, self._optimizer, self._update = capturer, optimizer, update
        self._graphs: dict[Hashable, Replay] = {}
        self._settings: list[Any] = []
        """Settings that graphs contain by their place in memory, which nothing else may take."""
        self._missing: tuple[Hashable, float | None] | None = None
        """Key and norm of the last update that had no graph."""
        self._is_missing_again = False
        """Whether the update before it had the same key: settings that change in every step need no graph."""
        device = optimizer.param_groups[0]["params"][0].device
        self._rates = [torch.zeros((), dtype=torch.float32, device=device) for _ in optimizer.param_groups]
        self._loaded = [float("nan") for _ in optimizer.param_groups]
        """Learning rates that the tensors contain."""

    def capture(self, max_norm: float | None) -> None:
        """Capture the update with the present settings, after a rehearsal, which changes the weights."""
        with capturing("the step of the optimiser"), self._rates_as_tensors():
            self._capturer.rehearse(lambda: self._update(max_norm))
        self._capture(self._key(max_norm), max_norm)

    @property
    def has_missing(self) -> bool:
        """Whether an update had no graph several times and should get one."""
        return self._missing is not None and self._is_missing_again and len(self._graphs) < MOST_GRAPHS

    def capture_missing(self) -> None:
        """Capture such an update, with the gradients that graphs write."""
        if self._missing is None or not self.has_missing:
            return
        if self._missing[0] == self._key(self._missing[1]):
            with suppress(CaptureError, torch.OutOfMemoryError):
                self._capture(*self._missing)
        self._missing, self._is_missing_again = None, False

    def clear(self) -> None:
        """Release all graphs."""
        self._graphs.clear()
        self._settings.clear()

    def run(self, max_norm: float | None) -> None:
        """Update the weights: by a graph, unless the settings of the optimiser have changed."""
        self.load_rates([group["lr"] for group in self._optimizer.param_groups])
        key = self._key(max_norm)
        replay = self._graphs.get(key)
        if replay is None:
            self._is_missing_again = self._missing is not None and self._missing[0] == key
            self._missing = key, max_norm
            self._update(max_norm)
        else:
            replay()

    def load_rates(self, rates: list[Any]) -> None:
        """Copy learning rates, numbers or tensors, to where graphs read them."""
        for number, (tensor, rate) in enumerate(zip(self._rates, rates, strict=True)):
            if isinstance(rate, Tensor):  # To compare it, the host would wait for the device.
                tensor.copy_(rate)
                self._loaded[number] = float("nan")
            elif rate != self._loaded[number]:
                tensor.fill_(rate)
                self._loaded[number] = float(rate)

    def replay_with_rate(self, rate: float) -> None:
        """Run the last captured update with one learning rate for all parameters."""
        self.load_rates([rate for _ in self._rates])
        self._graphs[next(reversed(self._graphs))]()

    def _capture(self, key: Hashable, max_norm: float | None) -> None:
        trained = [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]
        if any(parameter.grad is None for parameter in trained):
            raise CaptureError("the optimiser has parameters without a gradient.")  # The graph would leave them out.
        with capturing("the step of the optimiser"), self._rates_as_tensors():
            self._graphs[key] = self._capturer.capture(lambda: self._update(max_norm))
        self._settings += [tensor for group in self._optimizer.param_groups for tensor in tensors_in(_settings(group))]

    def _key(self, max_norm: float | None) -> Hashable:
        groups = self._optimizer.param_groups
        return max_norm, *(tuple((name, _value(value)) for name, value in _settings(group).items()) for group in groups)

    @contextmanager
    def _rates_as_tensors(self) -> Iterator[None]:
        groups = self._optimizer.param_groups
        numbers = [group["lr"] for group in groups]
        try:
            for group, tensor in zip(groups, self._rates, strict=True):
                group["lr"] = tensor
            yield
        finally:
            for group, number in zip(groups, numbers, strict=True):
                group["lr"] = number


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group that a graph contains: numbers, and places of tensors."""
    return {name: value for name, value in group.items() if name not in NOT_SETTINGS}


def _value(value: Any) -> Hashable:
    """Return a value that is equal if the setting is: a tensor is read when a graph runs, so only its place counts."""
    if isinstance(value, Tensor):
        return id(value)
    return tuple(map(_value, value)) if isinstance(value, list | tuple) else value


def prepare_for_capture(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Choose implementations of torch's optimisers that keep everything on the device; they compute the same.

    Called before the first step, because Adam and others then make their step counts on the device, too. Return a
    function that takes the choice back, for steps without graphs.
    """
    groups = optimizer.param_groups
    before = [{name: group[name] for name in IMPLEMENTATION if name in group} for group in groups]
    for group in groups:
        if "capturable" in group:
            group["capturable"] = True
        elif type(optimizer) in (torch.optim.SGD, SGD) and all(p.is_floating_point() for p in group["params"]):
            # Only the fused one takes the learning rate as a tensor without reading it.
            group["fused"], group["foreach"] = True, False
    # Torch would warn of steps that are not captured: the first few, and those of rare batch sizes.
    optimizer._warned_capturable_if_run_uncaptured = True

    def take_back() -> None:
        for group, values in zip(groups, before, strict=True):
            group.update(values)
            if not values.get("capturable", True) and not values.get("fused"):
                _move_counts_to_host(optimizer, group)

    return take_back


def _move_counts_to_host(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Move the step counts of a group to the host, where optimisers read them that are not capturable."""
    for parameter in group["params"]:
        state = optimizer.state.get(parameter, {})
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].cpu()
