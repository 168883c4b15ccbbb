"""A user's program under torchrun, whose rank 1 hangs after five steps."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import Tensor, nn

import paceline


def load_batch(step: int) -> Tensor:
    """Return a batch; sleep on rank 1 in step 5."""
    if step == 5 and os.environ["RANK"] == "1":
        time.sleep(600)
    return torch.ones(8, 4)


def main() -> None:
    """Train ten steps."""
    sync = paceline.attach(nn.Linear(4, 3), lambda p: torch.optim.SGD(p, lr=0.1), sys.argv[1], hang_timeout=3)
    for step in range(10):
        sync.model(load_batch(step)).sum().backward()
        sync.step()


if __name__ == "__main__":
    main()
