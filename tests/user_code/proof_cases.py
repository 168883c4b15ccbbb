"""Workloads for which the parity proof is difficult; tests run `paceline compare proof_cases:NAME` in this folder."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline import Workload


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise that depends on the seed of the DataLoader's worker, as random crops do."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(4) + index, torch.tensor(index % 3)


def workers() -> Workload:
    """Return a workload with augmenting worker processes, and with different weights each time it is loaded."""
    model, numbers = nn.Linear(4, 3), np.random.default_rng()
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(numbers.normal(size=(3, 4))))
    return Workload(model=model, train=DataLoader(Augmented(), num_workers=1), loss=F.cross_entropy)


def unseeded() -> Workload:
    """Return a workload whose loss draws from an unseeded generator."""
    numbers = np.random.default_rng()
    samples = torch.randn(64, 4), torch.randint(0, 3, (64,))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) * (0.5 + numbers.random())

    return Workload(model=nn.Linear(4, 3), train=samples, loss=loss)
