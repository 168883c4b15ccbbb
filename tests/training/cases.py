"""Workloads for proofs: small, and each with something that has gone wrong in somebody's data-parallel code."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.workloads.load import load_workload
from paceline.workloads.models import vgg
from paceline.workloads.workload import Workload, count_top1


class Tied(nn.Module):
    """The output layer's weight is the embedding's: one parameter under two names, two gradients into one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for the next token."""
        return self.out(torch.tanh(self.hidden(self.embedding(tokens).mean(1))))


def tied() -> Workload:
    """Next-token prediction on random tokens."""
    torch.manual_seed(1)
    tokens = torch.randint(0, 11, (96, 5))
    return Workload(model=Tied(), train=(tokens[:, :4], tokens[:, 4]), loss=F.cross_entropy, correct=count_top1)


def frozen() -> Workload:
    """A fine-tuning case: the first layer wants no gradient."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    model[0].requires_grad_(False)
    return Workload(model=model, train=(torch.randn(96, 6), torch.randint(0, 3, (96,))), loss=F.cross_entropy)


def dropout() -> Workload:
    """Randomness inside the model."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 3))
    return Workload(model=model, train=(torch.randn(96, 6), torch.randint(0, 3, (96,))), loss=F.cross_entropy)


def small_bn() -> Workload:
    """Convolutions with BatchNorm, as VGG-11 has them, in miniature."""
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
    """A built-in model on a few synthetic images, so that nothing has to be there."""
    config = RunConfig(workload=model, data="synthetic:size=96,test_size=36,noise=0.7", seed=4)
    return load_workload(config)


def slim_vgg11() -> Workload:
    """VGG-11 with an eighth of its channels: as many layers and tensors, and a sixtieth of the bytes."""
    slim = [[channels // 8 for channels in setup] for setup in vgg._STAGES]
    workload = images("cnn")
    torch.manual_seed(8)
    with mock.patch.object(vgg, "_STAGES", slim):
        return replace(workload, model=vgg.vgg11((3, 32, 32), 10))


def make(name: str) -> Workload:
    """The case of a name, in double precision."""
    own = {"tied": tied, "frozen": frozen, "dropout": dropout, "small_bn": small_bn, "slim_vgg11": slim_vgg11}
    workload = own[name]() if name in own else images(name)
    workload.model.double()
    return workload
