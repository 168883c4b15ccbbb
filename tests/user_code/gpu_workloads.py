"""Workloads for tests on a GPU; they also run on CPUs. `paceline train gpu_workloads:NAME` trains them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Workload
from paceline.training.loop import TrainingLoop
from paceline.training.recording import step_recorder
from paceline.workloads.workload import count_top1

SAMPLES, CLASSES = 100, 5


def with_batchnorm() -> Workload:
    """Return a convolutional network with BatchNorm, on samples of which a batch of 16 leaves 4 for the last one."""
    torch.manual_seed(0)
    layers = list[nn.Module]()
    for channels in (2, 8):  # A bias would have a gradient of rounding errors, by which AdamW moves it.
        layers += [nn.Conv2d(channels, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    return Workload(model=model, train=_samples(1), test=_samples(2), loss=F.cross_entropy, correct=count_top1)


def strict() -> Workload:
    """Return the same; whatever makes the host wait for the GPU between the beginning and end of a window raises.

    The first window prepares kernels, and at the end of each the host waits on purpose.
    """
    step_recorder.FLUSH_EVERY_S = math.inf  # Otherwise the figures of finished steps are read inside of windows.
    train_steps = TrainingLoop._train_steps

    def train_strictly(loop: TrainingLoop, *arguments: Any) -> int:
        if loop.windows.totals.last is None:
            return train_steps(loop, *arguments)
        with _waits_are_errors():
            return train_steps(loop, *arguments)

    TrainingLoop._train_steps = train_strictly  # type: ignore[method-assign]
    return with_batchnorm()


def strict_with_loader() -> Workload:
    """Return the same with batches that are read and copied to the GPU one by one."""
    return replace(strict(), train=DataLoader(TensorDataset(*_samples(1)), num_workers=1, batch_size=16))


def strict_with_iterable() -> Workload:
    """Return the same with an iterable of global batches."""
    x, y = _samples(1)
    return replace(strict(), train=list(zip(x.split(16), y.split(16), strict=True)))


def reads_its_loss() -> Workload:
    """Return a workload under the same rule that breaks it."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        found = F.cross_entropy(output, target)
        return found if found.item() < 1e9 else 2 * found

    return replace(strict(), loss=loss)


@contextmanager
def _waits_are_errors() -> Iterator[None]:
    if not torch.cuda.is_available():  # The workloads can then be tried without a GPU.
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _samples(seed: int) -> tuple[Tensor, Tensor]:
    """Return images whose class is the brightest part of the first channel, up to noise."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(SAMPLES) % CLASSES
    x = torch.randn(SAMPLES, 2, 8, 8, generator=generator)
    x[torch.arange(SAMPLES), 0, y] += 2
    return x, y
