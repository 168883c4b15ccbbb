"""Sums over the batches of an evaluation: exact, and without waiting for the device at each batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from device_operations import DeviceOperations
from paceline.config import RunConfig
from paceline.training.evaluate import Evaluation, evaluate
from paceline.workloads.batches import Share, make_source
from paceline.workloads.workload import Workload, count_top1

SAMPLES, BATCH = 50, 8
X = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(SAMPLES) % 3


def evaluated(**parts: Any) -> tuple[Evaluation, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    workload = Workload(model=model, train=(X, Y), **{"loss": F.cross_entropy, "correct": count_top1} | parts)
    source = make_source((X, Y), Share(0, 1, 1, torch.device("cpu")), batch=BATCH, seed=0, train=False)
    return evaluate(model, workload, source, RunConfig(), None), model


def test_every_sample_counts_once_also_in_a_smaller_last_batch() -> None:
    found, model = evaluated()
    with torch.no_grad():
        losses = F.cross_entropy(model(X), Y, reduction="none")
        correct = int((model(X).argmax(1) == Y).sum())
    assert found.loss == pytest.approx(float(losses.double().mean()), rel=1e-6)
    assert (found.accuracy, found.samples) == (correct / SAMPLES, SAMPLES)


@pytest.mark.parametrize("correct", [lambda *_: 2, lambda *_: torch.tensor([2.9])])
def test_correct_may_return_any_number(correct: Callable[..., Any]) -> None:
    assert evaluated(correct=correct)[0].accuracy == 2 * 7 / SAMPLES


def test_a_workload_may_count_nothing_correct() -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        with torch.enable_grad():
            return F.cross_entropy(model(batch[0]), batch[1]).reshape(1)

    found, _ = evaluated(loss=None, correct=None, step=step)
    assert found.accuracy is None
    assert found.loss == pytest.approx(evaluated()[0].loss, rel=1e-6)


def test_sums_in_half_precision_are_exact() -> None:
    """The sum of 7 losses of 1000 × 8 samples is no number of float16."""
    found, _ = evaluated(loss=lambda *_: torch.tensor(1000.0, dtype=torch.float16))
    assert found.loss == 1000


def test_no_batch_waits_for_the_device() -> None:
    with DeviceOperations(may_read=True) as operations:
        evaluated()
    assert operations.reads == 2, "the sums of losses and of correct predictions"
