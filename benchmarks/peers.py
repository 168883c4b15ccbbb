"""Peers of `step_overhead.py`: the same training with plain DDP, Hugging Face Accelerate and Lightning Fabric.

Every peer trains the same model from the same weights on the same samples. A step is that of the classic scripts:
gather the batch, normalise it, forward, backward, SGD, and read the loss and the accuracy. Peers differ only in the
library that wraps the model and the optimiser.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TextIO

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.config import RunConfig
from paceline.workloads.data.images import ImageSet
from paceline.workloads.models import MODELS
from paceline.workloads.sampler import Sampler

PRINT_EVERY = 20


@dataclass(frozen=True)
class Task:
    """Training task of all peers, on this rank."""

    config: RunConfig
    data: ImageSet
    rank: int
    world_size: int
    log: TextIO
    """File that rank 0 prints to."""

    def model(self) -> nn.Module:
        """Return a new model, with the initial weights of the seed."""
        torch.manual_seed(self.config.seed)
        channels, height, width = self.data.images.shape[1:]
        return MODELS[self.config.workload]((channels, height, width), self.data.classes)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return SGD with the run's settings; fused like Paceline's, so that only the code around it differs."""
        config = self.config
        return torch.optim.SGD(
            model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, fused=True
        )

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's batches, without end, in the order in which Paceline trains them."""
        images, labels = self.data.images, self.data.labels
        mean = torch.tensor(self.data.mean).view(1, -1, 1, 1)
        std = torch.tensor(self.data.std).view(1, -1, 1, 1)
        batch = self.config.global_batch(self.world_size)
        own = batch // self.world_size
        sampler = Sampler(len(self.data), batch, self.config.seed)
        for epoch in itertools.count():
            order = sampler.order(epoch)
            for start in range(self.rank * own, len(order), batch):
                indices = order[start : start + own]
                yield images[indices].float().div_(255).sub_(mean).div_(std), labels[indices]


@dataclass
class Meter:
    """Running loss and accuracy, which rank 0 prints every few steps."""

    task: Task
    losses: list[float] = field(default_factory=list)
    correct: int = 0
    seen: int = 0

    def add(self, loss: Tensor, logits: Tensor, target: Tensor) -> None:
        """Add the loss and the correct predictions of one step."""
        self.losses.append(loss.item())
        self.correct += int((logits.argmax(dim=1) == target).sum().item())
        self.seen += len(target)
        if len(self.losses) % PRINT_EVERY == 0 and self.task.rank == 0:
            mean = sum(self.losses[-PRINT_EVERY:]) / PRINT_EVERY
            accuracy = self.correct / self.seen
            print(f"step {len(self.losses)}: loss {mean:.4f}, accuracy {accuracy:.4f}", file=self.task.log, flush=True)


Train = Callable[[int], list[float]]
"""Function that trains the given number of steps and returns their losses on this rank."""


def plain_ddp(task: Task) -> Train:
    """Return a hand-written training loop with DDP."""
    model = DistributedDataParallel(task.model(), process_group=dist.new_group(backend="gloo"))
    optimizer = task.optimizer(model)
    batches, meter = task.batches(), Meter(task)

    def train(steps: int) -> list[float]:
        for images, target in itertools.islice(batches, steps):
            logits = model(images)
            loss = F.cross_entropy(logits, target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            meter.add(loss, logits, target)
        return meter.losses[-steps:]

    return train


def accelerate(task: Task) -> Train:
    """Return a loop as in Accelerate's quick tour. It accepts no process group, so it alone uses the default one."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == task.world_size
    model = task.model()
    model, optimizer = accelerator.prepare(model, task.optimizer(model))
    batches, meter = task.batches(), Meter(task)

    def train(steps: int) -> list[float]:
        for images, target in itertools.islice(batches, steps):
            logits = model(images)
            loss = F.cross_entropy(logits, target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            meter.add(loss, logits, target)
        return meter.losses[-steps:]

    return train


def fabric(task: Task) -> Train:
    """Return a loop as in Fabric's guide."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group=dist.new_group(backend="gloo"))
    fabric = Fabric(accelerator="cpu", devices=task.world_size, strategy=strategy)
    fabric.launch()
    assert fabric.world_size == task.world_size
    model = task.model()
    model, optimizer = fabric.setup(model, task.optimizer(model))
    batches, meter = task.batches(), Meter(task)

    def train(steps: int) -> list[float]:
        for images, target in itertools.islice(batches, steps):
            logits = model(images)
            loss = F.cross_entropy(logits, target)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            meter.add(loss, logits, target)
        return meter.losses[-steps:]

    return train


HAND_WRITTEN = "hand-written DDP"
AGAIN = "hand-written DDP, again"
_PEERS: dict[str, tuple[str, Callable[[Task], Train]]] = {
    HAND_WRITTEN: ("torch", plain_ddp),
    AGAIN: ("torch", plain_ddp),
    "Accelerate": ("accelerate", accelerate),
    "Lightning Fabric": ("lightning_fabric", fabric),
}
"""Peers by name, each with the package it needs. The hand-written loop runs twice: the difference is noise."""


def missing_peers() -> list[str]:
    """Return the peers whose package is not installed."""
    return [name for name, (package, _) in _PEERS.items() if importlib.util.find_spec(package) is None]


def make_peers(task: Task) -> dict[str, Train]:
    """Return every installed peer, each with its own model and process group."""
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(torch.get_num_threads())
    )  # Otherwise Accelerate sets the number of threads.
    missing = missing_peers()
    return {name: make(task) for name, (_, make) in _PEERS.items() if name not in missing}
