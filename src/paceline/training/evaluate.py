"""Evaluation of a model: no padding, every sample counted once, and the number of samples reported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from paceline.comm.group import Comm
from paceline.config import RunConfig
from paceline.training.compiled import without_compiled_code
from paceline.training.precision import autocast
from paceline.workloads.batches import Source
from paceline.workloads.workload import Workload


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation."""

    loss: float
    accuracy: float | None
    samples: int
    """Evaluated samples, each counted once."""


@contextmanager
def evaluation_mode(model: nn.Module, config: RunConfig, device: torch.device) -> Iterator[None]:
    """Run a model without gradients inside the `with` block, in evaluation mode and the precision of the run."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        stance = without_compiled_code() if config.compile else nullcontext()
        with torch.no_grad(), autocast(config.precision, device), stance:
            yield
    finally:
        for module, training in modes:  # Restore each module: a fine-tuned model may keep some in evaluation mode.
            module.training = training


def evaluate(model: nn.Module, workload: Workload, source: Source, config: RunConfig, comm: Comm | None) -> Evaluation:
    """Evaluate the model on this rank's share of `source`; given a `comm`, sum over its ranks."""
    # The sums stay on the device, so that no batch waits for the one before.
    loss, correct = (torch.zeros((), dtype=dtype, device=source.share.device) for dtype in (torch.float64, torch.int64))
    samples = 0
    counted = workload.correct is not None
    with evaluation_mode(model, config, source.share.device):
        for micro_batches in source.epoch(None):
            for micro_batch in micro_batches:
                outcome = workload.test_forward(model, source.fetch(micro_batch), config.tta)
                batch_correct = workload.count_correct(outcome)
                loss.add_(outcome.loss.detach().double().reshape(()), alpha=micro_batch.samples)
                if batch_correct is not None:
                    correct.add_(torch.as_tensor(batch_correct).long().reshape(()))
                samples += micro_batch.samples
    totals = torch.tensor([float(loss), samples, float(correct)], dtype=torch.float64)
    loss_sum, samples_sum, correct_sum = (comm.control.sum(totals) if comm else totals).tolist()
    if samples_sum == 0:
        return Evaluation(loss=float("nan"), accuracy=None, samples=0)
    accuracy = correct_sum / samples_sum if counted else None
    return Evaluation(loss=loss_sum / samples_sum, accuracy=accuracy, samples=int(samples_sum))
