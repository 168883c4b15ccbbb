"""Tests of examples/cifar10_94.py on a CPU, with synthetic images; the race to 94% needs a GPU and CIFAR-10."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from cifar10_94 import make_workload, whitening_weights

from paceline.config import RunConfig


def test_whitened_patches_are_uncorrelated() -> None:
    noise = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    images = F.avg_pool2d(noise, 3, stride=1, padding=1)  # Neighbouring pixels are correlated.
    weights = whitening_weights(images, directions=12, smallest=0.0)
    assert weights.shape == (24, 3, 3, 3)
    assert torch.equal(weights[12:], -weights[:12])
    outputs = F.conv2d(images, weights[:12]).transpose(0, 1).flatten(1)
    assert torch.allclose(torch.cov(outputs), torch.eye(12, dtype=torch.float64), atol=0.01)
    every = whitening_weights(images, directions=27, smallest=0.0)[:27]
    assert torch.equal(every[-12:], weights[:12])
    assert every[:-12].norm() > every[-12:].norm(), "what is left out has less variance, and so larger filters"


def test_the_network_learns_a_few_images() -> None:
    torch.manual_seed(0)
    workload = make_workload(RunConfig(data="synthetic:size=64"))
    images, labels = workload.train.batch(torch.arange(16), seed=0, epoch=None)
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(workload.model(images), labels)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    assert workload.recipe is not None
    assert workload.recipe.precision == "bf16"
    assert not workload.model.get_buffer("whitening").requires_grad
