"""Workload of the endurance test: it writes down which samples each rank trains, and fails when it is told to.

`PACELINE_LEDGER` names a folder. Each rank appends the samples of every step to a file of its own there. A file
`raise-RANK` or `sleep-RANK` makes that rank raise an exception or sleep, once.
`PACELINE_STEP_S` is the least time of a step.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline

SAMPLES, FEATURES, CLASSES = 6000, 8, 3


def make_workload() -> paceline.Workload:
    """Return a linear model, whose targets are the numbers of the samples."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(SAMPLES, FEATURES, generator=generator)
    labels = (samples[:, :CLASSES] + 0.5 * torch.randn(SAMPLES, CLASSES, generator=generator)).argmax(dim=1)
    ledger, rank = Path(os.environ["PACELINE_LEDGER"]), os.environ.get("RANK", "0")
    step_s = float(os.environ.get("PACELINE_STEP_S", "0.02"))
    file = (ledger / f"rank-{rank}-{os.getpid()}-{time.time_ns()}.txt").open("w", buffering=1)

    def loss(output: Tensor, numbers: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            file.write(" ".join(map(str, numbers.tolist())) + "\n")
            time.sleep(step_s)
            _fail_if_told(ledger, rank)
        return F.cross_entropy(output, labels[numbers])

    torch.manual_seed(0)
    return paceline.Workload(model=nn.Linear(FEATURES, CLASSES), train=(samples, torch.arange(SAMPLES)), loss=loss)


def _fail_if_told(ledger: Path, rank: str) -> None:
    for how in ("raise", "sleep"):
        told = ledger / f"{how}-{rank}"
        if told.exists():
            told.unlink()
            if how == "raise":
                raise RuntimeError("the endurance test made this sample fail")
            time.sleep(3600)
