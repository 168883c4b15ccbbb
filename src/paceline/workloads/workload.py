"""Workload: a model, batches, a loss and an optimiser. `make_workload` in a user's module returns one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import WorkloadError
from paceline.workloads.data.images import ImageSet


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything that is trained, independent of the strategy.

    If `make_workload` has a parameter, it receives the run's configuration: `config.lr`, `config.seed` and so on.
    """

    model: nn.Module
    train: Any
    """Data set (anything with a length and an index, a tensor or a tuple of tensors, a DataLoader), or an iterable of
    *global* batches, of which every rank takes its share."""
    test: Any = None
    """Test data, like `train`; None: nothing is evaluated."""
    loss: Callable[[Any, Any], Tensor] | None = None
    """`loss(model(inputs), target)` returns the mean over the samples; a batch is then a pair (inputs, target)."""
    step: Callable[[nn.Module, Any], Tensor] | None = None
    """Alternative to `loss`: `step(model, batch)` returns the mean loss over the samples of the batch. It must call
    `model(…)` itself: strategies wrap that call, and computation outside it is not synchronised."""
    correct: Callable[[Any, Any], Tensor] | None = None
    """`correct(model(inputs), target)` returns the number of correct predictions, for accuracies."""
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    """Factory of the optimiser from (name, parameter) pairs, which torch's optimisers accept; it also sets the
    learning rate. None: SGD with `--lr`, `--momentum` and `--weight-decay`."""
    classes: int | None = None
    """Number of classes, if the workload is a classification: accuracies are then compared with chance."""
    name: str = ""

    def __post_init__(self) -> None:
        if (self.loss is None) == (self.step is None):
            raise WorkloadError("a workload needs either `loss` or `step`.", hint="give exactly one of the two")
        if self.correct is not None and self.loss is None:
            raise WorkloadError(
                "`correct` needs the model's output, which `step` does not return.", hint="use `loss` instead of `step`"
            )
        if not isinstance(self.model, nn.Module):
            raise WorkloadError(
                f"the model is a {type(self.model).__name__}, not a torch.nn.Module.",
                hint="set `model` to a torch.nn.Module",
            )
        if not (isinstance(self.train, Iterable | ImageSet) or hasattr(self.train, "__getitem__")):
            raise WorkloadError(
                f"the training data is a {type(self.train).__name__}, which has neither an index nor an iterator.",
                hint="provide a data set, tensors, a DataLoader or an iterable of batches",
            )

    def forward(self, model: nn.Module, batch: Any) -> ForwardResult:
        """Run one forward pass and compute the loss."""
        if self.step is not None:
            return ForwardResult(self.step(model, batch))
        assert self.loss is not None
        inputs, target = batch
        output = model(inputs)
        return ForwardResult(self.loss(output, target), output, target)

    def count_correct(self, outcome: ForwardResult) -> Tensor | None:
        """Return the number of correct predictions of a forward pass; None if the workload does not count them."""
        if self.correct is None or outcome.output is None:
            return None
        with torch.no_grad():
            return self.correct(outcome.output, outcome.target)


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Result of a forward pass."""

    loss: Tensor
    output: Any = None
    target: Any = None


def count_top1(logits: Tensor, target: Tensor) -> Tensor:
    """Return the number of samples whose highest logit is that of their class."""
    return (logits.argmax(dim=1) == target).sum()
