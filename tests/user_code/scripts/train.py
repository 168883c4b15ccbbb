"""A user's training script with accumulation, clipping and a schedule; `--mistake` selects a common mistake."""

from __future__ import annotations

import argparse
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import paceline

BATCH = 24

parser = argparse.ArgumentParser()
parser.add_argument("--mistake", default="")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--quiet", action="store_true")
arguments = parser.parse_args()


def samples(count: int = 96) -> tuple[Tensor, Tensor]:
    """Return samples that are equal on all ranks."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def main() -> None:
    """Train on this rank's share of each batch."""
    if arguments.mistake == "never attaches":
        return
    torch.manual_seed(0)
    if arguments.mistake == "is not reproducible":
        torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    strategy = "ddp" if arguments.mistake == "names its strategy" else None
    sync = paceline.attach(model, lambda parameters: torch.optim.AdamW(parameters, lr=0.01), strategy)
    schedule = StepLR(sync.optimizer, step_size=10)
    x, y = samples()
    order = torch.Generator().manual_seed(2)

    def backward(indices: Tensor) -> None:
        output = sync.model(x[indices])
        loss = F.cross_entropy(output, y[indices])
        (loss * sync.weight(len(indices), BATCH)).backward()
        if not arguments.quiet:
            right = (output.argmax(1) == y[indices]).sum()
            sync.note(loss=loss, samples=len(indices), correct=right)

    for step in range(arguments.steps):
        if arguments.mistake == f"fails under {sync.strategy.name}" and step == 3:
            raise ValueError("sample 17 is damaged")
        first, last = torch.randint(len(x), (BATCH,), generator=order)[sync.rank :: sync.ranks].chunk(2)
        with sync.accumulate():
            backward(first)
        backward(last)
        if arguments.mistake == "clips by itself":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            sync.step()
        else:
            sync.step(max_norm=1.0)
        schedule.step()
    sync.close()


try:
    main()
finally:
    print("left in order", flush=True)
