"""Strategies of a user's own: one that is right, one that is wrong, one that breaks, one that is slow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import AfterBackward


class Mean(AfterBackward):
    """The mean over the ranks."""

    name: ClassVar[str] = "mean"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        """Adds up and divides."""
        for gradient in gradients:
            dist.all_reduce(gradient, group=self.comm.group)
        torch._foreach_div_(list(gradients), self.comm.world_size)


class Sum(AfterBackward):
    """Forgets to divide."""

    name: ClassVar[str] = "sum"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        """Adds up."""
        for gradient in gradients:
            dist.all_reduce(gradient, group=self.comm.group)


class Breaks(Mean):
    """Passes the proof, and fails a few steps into training."""

    name: ClassVar[str] = "breaks"
    calls = 0

    def agree(self, gradients: Sequence[Tensor]) -> None:
        """Fails on one rank."""
        self.calls += 1
        if self.calls > 6 and self.comm.rank == 1:
            raise RuntimeError("the seventh message was one too many")
        super().agree(gradients)


class Slow(Mean):
    """Takes its time."""

    name: ClassVar[str] = "slow"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        """Sleeps before it agrees."""
        time.sleep(0.1)
        super().agree(gradients)


class BadClose(Mean):
    """Trains well, and fails when it is done."""

    name: ClassVar[str] = "bad_close"

    def close(self) -> None:
        """Fails in training, not in the proof, whose optimiser steps nothing."""
        stepped = bool(self.optimizer.state) if self._attached else False
        super().close()
        if stepped:
            raise RuntimeError("cannot close")
