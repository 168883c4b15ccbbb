"""Graph of the update: clipping and the step of the optimiser, with the learning rate as a tensor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.training.graphs.capture import Capturer, Replay, capturing

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
        device = optimizer.param_groups[0]["params"][0].device
        self._rates = [torch.zeros((), dtype=torch.float32, device=device) for _ in optimizer.param_groups]
        self._loaded = [float("nan") for _ in optimizer.param_groups]
        """Learning rates that the tensors contain."""

    def run(self, max_norm: float | None) -> None:
        """Update the weights: by a graph, unless the optimiser's settings have changed too often."""
        self.load_rates([group["lr"] for group in self._optimizer.param_groups])
        key = (max_norm, *(_settings_of(group) for group in self._optimizer.param_groups))
        if key not in self._graphs:
            if len(self._graphs) == MOST_GRAPHS:
                self._update(max_norm)
                return
            self._graphs[key] = self._captured(max_norm)
        self._graphs[key]()

    def load_rates(self, rates: list[float]) -> None:
        """Copy learning rates to where graphs read them."""
        for number, (tensor, rate) in enumerate(zip(self._rates, rates, strict=True)):
            if rate != self._loaded[number]:
                tensor.fill_(rate)
                self._loaded[number] = float(rate)

    def replay_with_rate(self, rate: float) -> None:
        """Run the last captured update with one learning rate for all parameters."""
        self.load_rates([rate for _ in self._rates])
        self._graphs[next(reversed(self._graphs))]()

    def _captured(self, max_norm: float | None) -> Replay:
        with capturing("the step of the optimiser"), self._rates_as_tensors():
            return self._capturer.capture(lambda: self._update(max_norm))

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


def _settings_of(group: dict[str, Any]) -> Hashable:
    """Return the settings of a parameter group that a graph contains as numbers."""
    return tuple((key, _value(value)) for key, value in group.items() if key not in NOT_SETTINGS)


def _value(value: Any) -> Hashable:
    """Return a value that is equal if the setting is: a tensor is read when a graph runs, so only its place counts."""
    if isinstance(value, Tensor):
        return id(value)
    return tuple(value) if isinstance(value, list) else value


def prepare_for_capture(optimizer: torch.optim.Optimizer) -> None:
    """Choose implementations of torch's optimisers that keep everything on the device; they compute the same.

    Called before the first step, because Adam and others then make their step counts on the device, too.
    """
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
        elif "fused" in group:  # SGD: only the fused one takes the learning rate as a tensor without reading it.
            group["fused"], group["foreach"] = True, False
    # Torch would warn of steps that are not captured: the first few, and those of rare batch sizes.
    optimizer._warned_capturable_if_run_uncaptured = True
