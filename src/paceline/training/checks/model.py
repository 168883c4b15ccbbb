"""Check of a model before training: a few passes on two samples, to report problems early and in words."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.messages.nested_tensors import tensors_in
from paceline.config import RunConfig
from paceline.errors import PacelineError, WorkloadError
from paceline.strategies.base.strategy import no_gradient_error
from paceline.training.compiler_import import exclude_from_compiler
from paceline.training.evaluate import evaluation_mode
from paceline.training.precision import autocast
from paceline.workloads.batches import Source, batch_size, repeat_batch
from paceline.workloads.random_state import kept_random_state
from paceline.workloads.workload import ForwardResult, Workload, count_top1

SAMPLES = 2
MEAN_LOSSES = (F.cross_entropy, F.mse_loss, F.nll_loss, F.l1_loss, F.binary_cross_entropy_with_logits)
"""Functions whose default is the mean over the samples, so that they need no check."""
CLASS_LOSSES = (F.cross_entropy, F.nll_loss)
FORWARD_AND_BACKWARD = 3
"""FLOP of forward and backward ÷ those of forward: backward computes the gradients of inputs and of weights."""
CLASS_LOSS_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)
ROUNDING = 1e-3
"""Largest relative difference of two losses that are taken as equal."""


def check_model(
    model: nn.Module,
    workload: Workload,
    source: Source,
    config: RunConfig,
    rank: int,
    test: Source | None = None,
    *,
    count_flop: bool = False,
) -> float | None:
    """Raise for a workload that would fail or train wrongly, found on two samples of the training and the test data.

    The error names parameters without a gradient, unless they are allowed. The check changes nothing: gradients,
    buffers and random number generators are restored. With `count_flop`, return the FLOP of the forward and backward
    pass of one sample; None if they cannot be counted.
    """
    kept = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    missing: list[str] = []
    flop: float | None = None
    with kept_random_state(source.share.device):
        with _blaming_the_model("on its first batch", config):
            batch = source.peek(SAMPLES)
        if batch is not None:
            missing, flop = _check_training(model, workload, source, batch, config, count_flop)
        if test is not None:
            _check_test(model, workload, test, config)
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in kept and kept[name].shape == buffer.shape:  # The pass may have made others, such as caches.
                buffer.copy_(kept[name])
    if missing:
        raise no_gradient_error(missing, rank)
    return flop


def _check_training(
    model: nn.Module, workload: Workload, source: Source, batch: Any, config: RunConfig, count_flop: bool
) -> tuple[list[str], float | None]:
    """Check one forward and backward pass; return the names of parameters without a gradient, and FLOP per sample."""
    with _blaming_the_model("on its first batch", config, batch):
        with autocast(config.precision, source.share.device):
            outcome, flop = _forward(model, workload, batch, count_flop)
        _check_outcome(workload, outcome)
        if not torch.isfinite(outcome.loss) and _is_not_finite(batch):
            raise WorkloadError(
                "the training data contains NaN or infinity, in one of its first two samples.",
                hint="remove such samples, or replace the values",
            )
        if not config.allow_unused:
            outcome.loss.backward()
    _check_labels("training", workload, outcome, source)
    _check_mean(model, workload, batch, source, config)
    flop_per_sample = FORWARD_AND_BACKWARD * flop / batch_size(batch) if flop else None
    if config.allow_unused:
        return [], flop_per_sample
    return [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None], flop_per_sample


def _forward(model: nn.Module, workload: Workload, batch: Any, count_flop: bool) -> tuple[ForwardResult, int]:
    """Return the result of a forward pass and its FLOP; 0 if they are not counted."""
    if count_flop:
        from torch.utils import flop_counter

        mode = getattr(flop_counter, "_FlopCounterMode", None)
        if mode is not None:  # Of another version of torch, which may have no such class, the compiler is imported.
            exclude_from_compiler(mode.__torch_dispatch__)
        try:
            with flop_counter.FlopCounterMode(display=False) as counter:
                return workload.forward(model, batch), counter.get_total_flops()
        except Exception:  # The counter does not support every model; without it, the model's own errors show.
            model.zero_grad(set_to_none=True)
    return workload.forward(model, batch), 0


def _check_test(model: nn.Module, workload: Workload, test: Source, config: RunConfig) -> None:
    """Check that the model can be evaluated on the test data, before time is spent on training."""
    with _blaming_the_model("on the test data", config):
        batch = test.peek(SAMPLES)
    if batch is None:
        return
    with _blaming_the_model("on the test data", config, batch), evaluation_mode(model, config, test.share.device):
        outcome = workload.test_forward(model, batch, config.tta)
        _check_outcome(workload, outcome)
    _check_labels("test", workload, outcome, test)


@contextmanager
def _blaming_the_model(where: str, config: RunConfig, batch: Any = None) -> Iterator[None]:
    """Turn an exception of the user's code into one sentence that says where the model failed."""
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"the model failed {where}: {type(error).__name__}: {error}",
            hint=_hint(str(error), config, batch),
            detail=traceback.format_exc().rstrip(),
        ) from None


def _hint(error: str, config: RunConfig, batch: Any) -> str:
    if config.precision == "fp16" and "Half" in error:  # As torch names a type that an operation lacks.
        return "an operation of the model does not support float16 on this device; use --precision bf16 or fp32"
    inputs = next(tensors_in(batch), None)
    target = batch[1] if isinstance(batch, list | tuple) and len(batch) == 2 else None
    if "device-side assert" in error:
        return "a label or an index may be out of range; use --device cpu to see which"
    if "type" in error and isinstance(target, Tensor) and target.is_floating_point() and "Long" in error:
        return f"the targets are {target.dtype}; class labels are integers, as y.long() makes them"
    if "type" in error and inputs is not None and inputs.dtype == torch.uint8:
        return "the inputs are bytes; make them floating-point numbers, as x.float() / 255 does"
    return "see the traceback above; the check runs the model on two samples"


def _check_outcome(workload: Workload, outcome: ForwardResult) -> None:
    """Raise for a loss or a count of correct predictions that is not one number."""
    loss: object = outcome.loss
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise WorkloadError(
            f"the loss is {_describe(loss)}, not a scalar tensor.",
            hint="return the mean over the samples, as reduction='mean' does",
        )
    correct: object = workload.count_correct(outcome)
    if isinstance(correct, Tensor) and correct.numel() != 1:
        raise WorkloadError(
            f"`correct` returned {_describe(correct)}, not a number.",
            hint="return the number of correct predictions, as (output.argmax(1) == target).sum() does",
        )


def _describe(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _is_not_finite(batch: Any) -> bool:
    return any(not bool(torch.isfinite(tensor).all()) for tensor in tensors_in(batch))


def _check_labels(data: str, workload: Workload, outcome: ForwardResult, source: Source) -> None:
    """Raise if a sample's class is not one of the model's outputs; data in tensors is checked as a whole."""
    loss, output = workload.loss, outcome.output
    if not (loss in CLASS_LOSSES or isinstance(loss, CLASS_LOSS_MODULES)) or len(source.columns) != 2:
        return
    labels = source.columns[1]
    if not isinstance(output, Tensor) or output.dim() < 2 or labels.is_floating_point():
        return
    classes, ignored = output.shape[1], getattr(loss, "ignore_index", -100)
    wrong = ((labels < 0) | (labels >= classes)) & (labels != ignored)
    if bool(wrong.any()):
        sample = int(wrong.reshape(len(labels), -1).any(1).nonzero()[0])
        label = int(labels[wrong][0])
        raise WorkloadError(
            f"sample {sample} of the {data} data has the label {label}, but the model has {classes} outputs.",
            hint=f"use labels from 0 to {classes - 1}, or give the model more outputs",
        )


def _check_mean(model: nn.Module, workload: Workload, batch: Any, source: Source, config: RunConfig) -> None:
    """Raise for a loss that is a sum over the samples, and for a share in place of a count of correct predictions.

    Two and three copies of a batch have the same mean loss as one, and two and three times its sum. A loss that
    compares samples with each other has neither, and is left alone; so is one that fails or is not repeatable.
    """
    if workload.loss in MEAN_LOSSES and workload.correct in (None, count_top1):
        return
    losses: list[float] = []
    counts: list[float] = []
    try:
        size = batch_size(batch)
        with evaluation_mode(model, config, source.share.device):
            for copies in (1, 2, 3, 1):
                outcome = workload.forward(model, repeat_batch(batch, size, copies))
                correct = workload.count_correct(outcome)
                losses.append(float(outcome.loss))
                counts.append(0.0 if correct is None else float(correct))
                if copies == 2 and not _grows(losses) and not 0 < counts[1] == counts[0]:
                    return
    except Exception:  # Some models compute no loss in evaluation mode, or need batches of one size.
        return
    if not _equal(losses[3], losses[0]):
        return
    if _grows(losses):
        raise WorkloadError(
            "the loss is a sum over the samples: twice the batch has twice the loss.",
            hint="return the mean over the samples, as reduction='mean' does",
        )
    if 0 < counts[0] == counts[1] == counts[2]:
        raise WorkloadError(
            "`correct` does not count: it returns the same for twice the batch.",
            hint="return the number of correct predictions, as (output.argmax(1) == target).sum() does",
        )


def _grows(losses: list[float]) -> bool:
    """Whether the losses of one, two, three copies of a batch are one, two, three times the first."""
    expected = [losses[0] * copies for copies in range(1, 1 + min(3, len(losses)))]
    return losses[0] != 0 and all(_equal(loss, right) for loss, right in zip(losses, expected, strict=False))


def _equal(one: float, other: float) -> bool:
    return abs(one - other) <= ROUNDING * max(abs(one), abs(other))
