"""A workload: a model, batches, a loss, an optimiser. What `make_workload` in a user's own module returns."""

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
    """What is trained, apart from how ranks agree on it.

    A `make_workload` that takes an argument is given the run's configuration: `config.lr`, `config.seed` and so on.
    """

    model: nn.Module
    train: Any
    """A data set (anything with a length and an index, a tensor or a tuple of tensors, a DataLoader), or an iterable
    of *global* batches, of which every rank takes its share."""
    test: Any = None
    """As `train`, or None: then nothing is evaluated."""
    loss: Callable[[Any, Any], Tensor] | None = None
    """`loss(model(inputs), target)`, the mean over the samples; a batch is then a pair (inputs, target)."""
    step: Callable[[nn.Module, Any], Tensor] | None = None
    """The other way to say it: `step(model, batch)` returns the mean loss over the samples of the batch. It has to call
    `model(…)` itself: strategies go around that call, and what is computed past it is not synchronised."""
    correct: Callable[[Any, Any], Tensor] | None = None
    """`correct(model(inputs), target)`, how many samples are right: gives accuracies."""
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    """Makes the optimiser from (name, parameter) pairs, as torch's own accept them. It decides on the learning rate by
    itself; None is SGD as `--lr`, `--momentum` and `--weight-decay` say."""
    classes: int | None = None
    """How many classes a sample can be of, where that makes sense: accuracies are then judged against chance."""
    name: str = ""

    def __post_init__(self) -> None:
        if (self.loss is None) == (self.step is None):
            raise WorkloadError("a workload needs either `loss` or `step`.", hint="give exactly one of the two")
        if self.correct is not None and self.loss is None:
            raise WorkloadError("`correct` needs the model's output, which `step` keeps to itself.", hint="use `loss`")
        if not isinstance(self.model, nn.Module):
            raise WorkloadError(f"the model is a {type(self.model).__name__}, not a torch.nn.Module.")
        if not (isinstance(self.train, Iterable | ImageSet) or hasattr(self.train, "__getitem__")):
            raise WorkloadError(
                f"the training data is a {type(self.train).__name__}.",
                hint="give a data set, tensors, a DataLoader or an iterable of batches",
            )

    def forward(self, model: nn.Module, batch: Any) -> ForwardResult:
        """One forward pass."""
        if self.step is not None:
            return ForwardResult(self.step(model, batch))
        assert self.loss is not None
        inputs, target = batch
        output = model(inputs)
        return ForwardResult(self.loss(output, target), output, target)

    def count_correct(self, outcome: ForwardResult) -> Tensor | None:
        """How many samples of a forward pass are right; None where the workload has no notion of that."""
        if self.correct is None or outcome.output is None:
            return None
        with torch.no_grad():
            return self.correct(outcome.output, outcome.target)


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """What a forward pass gave."""

    loss: Tensor
    output: Any = None
    target: Any = None


def count_top1(logits: Tensor, target: Tensor) -> Tensor:
    """How many samples have their class on top."""
    return (logits.argmax(dim=1) == target).sum()
