"""Workload: a model, batches, a loss and an optimiser. `make_workload` in a user's module returns one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.config.recipe import Recipe
from paceline.config.run import TestAugmentation
from paceline.errors import WorkloadError
from paceline.formatting import join_names
from paceline.workloads.data.images import ImageSet
from paceline.workloads.label_smoothing import smoothed_cross_entropy


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
    learning rate. None: the optimiser of the recipe."""
    recipe: Recipe | None = None
    """Recipe to train it by; the command line overrides single settings. None: SGD at a low, constant learning rate."""
    scheduler: Callable[[torch.optim.Optimizer, int | None], torch.optim.lr_scheduler.LRScheduler] | None = None
    """`scheduler(optimizer, steps)` returns a scheduler of torch, which is stepped after every step; `steps` is the
    length of the run, None if unknown. It replaces the recipe's schedule, warm-up included."""
    classes: int | None = None
    """Number of classes, if the workload is a classification: accuracies are then compared with chance."""
    name: str = ""
    label_smoothing: float = 0.0
    """Label smoothing of the training loss, which must be cross-entropy. Set from the recipe."""

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
        if self.recipe is not None and not isinstance(self.recipe, Recipe):
            raise WorkloadError(
                f"`recipe` is a {type(self.recipe).__name__}, not a Recipe.", hint="use recipe=paceline.Recipe(…)"
            )
        _check_data("training", self.train)
        if self.test is not None:
            _check_data("test", self.test)

    def forward(self, model: nn.Module, batch: Any) -> ForwardResult:
        """Run one forward pass and compute the loss to train with."""
        return self._forward(model, batch, self.label_smoothing)

    def test_forward(self, model: nn.Module, batch: Any, tta: TestAugmentation = "none") -> ForwardResult:
        """Run one forward pass and compute the loss to report: without label smoothing.

        With `mirror`, the output is the mean of those for the images and for their mirror images; with `mirror+shift`,
        the mean of that and of what it is for images shifted by a pixel to the upper left and to the lower right. The
        border of a shifted image repeats the neighbouring pixels, reflected.
        """
        if tta == "none":
            return self._forward(model, batch, 0.0)
        images = _images_of(self, batch, tta)
        assert self.loss is not None, "a workload with `step` is refused"
        target = batch[1]
        output = _mean_of_mirrored(model, images)
        if tta == "mirror+shift":
            wider = F.pad(images, [1, 1, 1, 1], mode="reflect")
            shifted = wider[..., 2:, 2:], wider[..., :-2, :-2]
            output = output / 2 + sum(_mean_of_mirrored(model, one) for one in shifted) / 4
        return ForwardResult(self.loss(output, target), output, target)

    def _forward(self, model: nn.Module, batch: Any, label_smoothing: float) -> ForwardResult:
        if self.step is not None:
            return ForwardResult(self.step(model, batch))
        assert self.loss is not None
        inputs, target = batch
        output = model(inputs)
        if label_smoothing and self.loss is F.cross_entropy and isinstance(self.train, ImageSet):
            # The labels of such data are classes, all of them.
            return ForwardResult(smoothed_cross_entropy(output, target, label_smoothing), output, target)
        options = {"label_smoothing": label_smoothing} if label_smoothing else {}
        return ForwardResult(self.loss(output, target, **options), output, target)

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


def _mean_of_mirrored(model: nn.Module, images: Tensor) -> Any:
    """Return the mean of the outputs for the images and for their mirror images."""
    return (model(images) + model(images.flip(-1))) / 2


def _images_of(workload: Workload, batch: Any, tta: TestAugmentation) -> Tensor:
    """Return the images of a test batch, which can be mirrored; raise if there are none."""
    hint = "leave --tta out: it needs images as a floating-point tensor [N, C, H, W], and `loss` instead of `step`"
    if workload.step is not None:
        reason = "the workload defines `step`, which returns no output"
        raise WorkloadError(f"--tta {tta} was given, but {reason}.", hint=hint)
    images = batch[0]
    if not isinstance(images, Tensor) or images.dim() != 4 or not images.is_floating_point():
        kind = f"{images.dtype} {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise WorkloadError(f"--tta {tta} was given, but the test inputs are no images: {kind}.", hint=hint)
    return images


def _check_data(name: str, data: Any) -> None:
    """Raise for data that is of no known kind, or whose parts differ in length."""
    if isinstance(data, DataLoader):
        data = data.dataset
        if isinstance(data, list | tuple):  # Here a list holds samples.
            return
    if isinstance(data, Mapping):
        raise WorkloadError(
            f"the {name} data is a {type(data).__name__}, whose keys are not samples.",
            hint="provide a tuple of tensors, a data set, or an iterable of batches, each of which may be a dict",
        )
    if not (isinstance(data, Iterable | ImageSet) or hasattr(data, "__getitem__")):
        raise WorkloadError(
            f"the {name} data is a {type(data).__name__}, which has neither an index nor an iterator.",
            hint="provide a data set, tensors, a DataLoader or an iterable of batches",
        )
    columns = data.tensors if isinstance(data, TensorDataset) else data
    if isinstance(columns, Tensor):
        columns = (columns,)
    if isinstance(columns, tuple) and any(isinstance(column, Tensor | np.ndarray) for column in columns):
        _check_columns(name, columns)


def _check_columns(name: str, columns: tuple[Any, ...]) -> None:
    """Raise for a tuple of which not every member has a row per sample."""
    other = next((column for column in columns if not isinstance(column, Tensor)), None)
    if other is not None:
        raise WorkloadError(
            f"the {name} data is a tuple with a {type(other).__name__}, but its members must all be tensors.",
            hint="convert it, for example by torch.as_tensor",
        )
    if any(column.dim() == 0 for column in columns):
        raise WorkloadError(
            f"the {name} data has a tensor without dimensions.",
            hint="provide tensors with the samples along the first dimension",
        )
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        counts = join_names([str(length) for length in lengths])
        what = f"{lengths[0]} inputs and {lengths[1]} targets" if len(lengths) == 2 else f"tensors of {counts} samples"
        raise WorkloadError(f"the {name} data has {what}.", hint="give each sample one row in every tensor")
