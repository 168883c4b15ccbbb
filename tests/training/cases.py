"""Workloads for proofs: small ones, each with a property that data-parallel code has handled wrongly before."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.strategies.allreduce import AllReduce
from paceline.workloads.load import load_workload
from paceline.workloads.models import vgg
from paceline.workloads.workload import Workload, count_top1


class Tied(nn.Module):
    """Model whose output layer shares the embedding's weight: one parameter with two names and two gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits for the next token."""
        return self.out(torch.tanh(self.hidden(self.embedding(tokens).mean(1))))


def tied() -> Workload:
    """Return next-token prediction on random tokens."""
    torch.manual_seed(1)
    tokens = torch.randint(0, 11, (96, 5))
    return Workload(model=Tied(), train=(tokens[:, :4], tokens[:, 4]), loss=F.cross_entropy, correct=count_top1)


class WithMetrics(AllReduce):
    """Strategy that reports figures of its own, one of them under a name that asynchronous servers use."""

    name = "with_metrics"

    def metrics(self) -> dict[str, Any]:
        """Return the figures."""
        return {"ratio": torch.tensor(0.75), "staleness": 3.0}


def frozen() -> Workload:
    """Return a fine-tuning case: the first layer requires no gradient."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    model[0].requires_grad_(False)
    return Workload(model=model, train=(torch.randn(96, 6), torch.randint(0, 3, (96,))), loss=F.cross_entropy)


def dropout() -> Workload:
    """Return a model with dropout."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 3))
    return Workload(model=model, train=(torch.randn(96, 6), torch.randint(0, 3, (96,))), loss=F.cross_entropy)


def small_bn() -> Workload:
    """Return convolutions with BatchNorm, like a small VGG-11."""
    torch.manual_seed(5)
    layers = [
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.BatchNorm2d(6),
        nn.ReLU(),
    ]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(54, 3))
    return Workload(model=model, train=(torch.randn(96, 3, 10, 10), torch.randint(0, 3, (96,))), loss=F.cross_entropy)


def images(model: str) -> Workload:
    """Return a built-in model on a few synthetic images, which need no files."""
    workload = _shared_images(model)
    return replace(workload, model=copy.deepcopy(workload.model))


@cache
def _shared_images(model: str) -> Workload:
    """Return the workload whose data `images` shares: to draw them takes longer than to train on them."""
    config = RunConfig(workload=model, data="synthetic:size=96,test_size=36,noise=0.7", seed=4)
    return load_workload(config)


def slim_vgg11() -> Workload:
    """Return VGG-11 with an eighth of its channels: as many layers and tensors, and a sixtieth of the bytes."""
    slim = [[channels // 8 for channels in setup] for setup in vgg._STAGES]
    workload = images("cnn")
    torch.manual_seed(8)
    with mock.patch.object(vgg, "_STAGES", slim):
        return replace(workload, model=vgg.vgg11((3, 32, 32), 10))


def make(name: str) -> Workload:
    """Return the case with the given name, in double precision."""
    own = {"tied": tied, "frozen": frozen, "dropout": dropout, "small_bn": small_bn, "slim_vgg11": slim_vgg11}
    workload = own[name]() if name in own else images(name)
    workload.model.double()
    return workload
