"""Script that attaches models again and again, and several at once. Rank 0 prints what was found, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline

TIMEOUT_S = 60.0


def attach(model: nn.Module, strategy: str) -> paceline.Sync:
    """Attach a model."""
    return paceline.attach(model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), strategy, timeout=TIMEOUT_S)


def train(sync: paceline.Sync, steps: int = 2) -> None:
    """Train on data that differs between ranks."""
    for step in range(steps):
        torch.manual_seed(10 * step + sync.rank)
        sync.model(torch.randn(4, 6)).square().mean().backward()
        sync.step()


def make_model(seed: int = 0) -> nn.Module:
    """Return a small model."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def weights(model: nn.Module) -> Tensor:
    """Return all weights in one tensor."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def rounds(strategies: list[str]) -> list[list[float]]:
    """Attach and close three times under each strategy; return the weights' sum after each round."""
    sums = []
    for strategy in strategies:
        model, found = make_model(), []
        for _ in range(3):
            sync = attach(model, strategy)
            train(sync)
            sync.close()
            found.append(float(weights(model).double().sum()))
        sums.append(found)
    return sums


def two_at_once(strategy: str, close_first: int) -> list[float]:
    """Attach two models, close one of them, train the other; return how far each is from training it alone."""
    models = [make_model(seed) for seed in range(2)]
    syncs = [attach(model, strategy) for model in models]
    for sync in syncs:
        train(sync)
    syncs[close_first].close()
    remaining = syncs[1 - close_first]
    train(remaining)
    mean = remaining.mean(float(remaining.rank))
    assert mean == (remaining.ranks - 1) / 2
    remaining.close()
    distances = []
    for number, model in enumerate(models):
        alone = make_model(number)
        with attach(alone, strategy) as sync:
            train(sync)
            if number != close_first:
                train(sync)
        distances.append(float((weights(alone) - weights(model)).norm()))
    return distances


def main(strategies: list[str]) -> None:
    """Run all cases, first in a world that attach() joins, then in one that the script has joined."""
    found: dict[str, Any] = {"rounds": rounds(strategies)}
    found["left"] = not dist.is_initialized()
    found["two"] = [two_at_once(strategy, first) for strategy in strategies for first in (0, 1)]
    found["left at the end"] = not dist.is_initialized()
    dist.init_process_group("gloo")
    found["own rounds"] = rounds(strategies)
    found["kept"] = dist.is_initialized()
    total = torch.ones(1)
    dist.all_reduce(total)
    found["total"] = float(total)
    rank = dist.get_rank()
    sync = attach(make_model(), strategies[0])
    dist.destroy_process_group()
    sync.close()  # The groups have been destroyed with the world.
    if rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
