"""A user's strategies: correct, incorrect, failing during training, slow, failing at the end, different on ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import AfterBackward


class Mean(AfterBackward):
    """Correct: the mean over the ranks."""

    name: ClassVar[str] = "mean"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        """Sum the gradients and divide."""
        for gradient in gradients:
            dist.all_reduce(gradient, group=self.comm.group)
        torch._foreach_div_(list(gradients), self.comm.world_size)


class Sum(AfterBackward):
    """Incorrect: the sum, without the division."""

    name: ClassVar[str] = "sum"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        """Sum the gradients."""
        for gradient in gradients:
            dist.all_reduce(gradient, group=self.comm.group)


class Breaks(Mean):
    """Passes the proof, and fails after a few steps of training."""

    name: ClassVar[str] = "breaks"
    calls = 0

    def agree(self, gradients: Sequence[Tensor]) -> None:
        """Raise on rank 1 in the seventh call."""
        self.calls += 1
        if self.calls > 6 and self.comm.rank == 1:
            raise RuntimeError("the seventh message was one too many")
        super().agree(gradients)


class Held(Mean):
    """Correct; waits in the seventh call while the file exists that PACELINE_TEST_HOLD names."""

    name: ClassVar[str] = "held"
    calls = 0

    def agree(self, gradients: Sequence[Tensor]) -> None:
        """Wait before the all-reduce."""
        self.calls += 1
        while self.calls == 7 and Path(os.environ["PACELINE_TEST_HOLD"]).exists():
            time.sleep(0.02)
        super().agree(gradients)


class Slow(Mean):
    """Correct, and 100 ms slower per step."""

    name: ClassVar[str] = "slow"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        """Sleep before the all-reduce."""
        time.sleep(0.1)
        super().agree(gradients)


class BadClose(Mean):
    """Trains correctly, and fails in `close`."""

    name: ClassVar[str] = "bad_close"

    def close(self) -> None:
        """Raise after training, but not after the proof, whose optimiser makes no step."""
        stepped = bool(self.optimizer.state) if self._attached else False
        super().close()
        if stepped:
            raise RuntimeError("cannot close")


class OtherSizes(AfterBackward):
    """Incorrect: the ranks call the same collective with tensors of different sizes."""

    name: ClassVar[str] = "other_sizes"

    def agree(self, gradients: Sequence[Tensor]) -> None:  # noqa: ARG002
        """Sum fewer numbers on rank 1 than on rank 0."""
        dist.all_reduce(torch.zeros(50 if self.comm.rank else 100), group=self.comm.group)


class OtherKinds(AfterBackward):
    """Incorrect: the ranks call different collectives."""

    name: ClassVar[str] = "other_kinds"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        """Sum on rank 0, and broadcast on rank 1."""
        if self.comm.rank == 0:
            dist.all_reduce(gradients[0], group=self.comm.group)
        else:
            dist.broadcast(gradients[0], 0, group=self.comm.group)


class SkipsScatter(AfterBackward):
    """Incorrect: rank 1 skips the scatter of the fourth step."""

    name: ClassVar[str] = "skips_scatter"
    calls = 0

    def agree(self, gradients: Sequence[Tensor]) -> None:
        """Gather the gradients on rank 0, and scatter the mean."""
        self.calls += 1
        for gradient in gradients:
            on_0 = self.comm.rank == 0
            parts = [torch.empty_like(gradient) for _ in range(self.comm.world_size)] if on_0 else None
            dist.gather(gradient, parts, group_dst=0, group=self.comm.group)
            means = [torch.stack(parts).mean(0)] * self.comm.world_size if parts is not None else None
            if self.calls != 4 or self.comm.rank != 1:
                dist.scatter(gradient, means, group_src=0, group=self.comm.group)


class OtherMessages(AfterBackward):
    """Incorrect: rank 0 sends more numbers, or fewer, than rank 1 receives, as PACELINE_TEST_NUMBERS says."""

    name: ClassVar[str] = "other_messages"

    def agree(self, gradients: Sequence[Tensor]) -> None:  # noqa: ARG002
        """Send numbers from rank 0 to rank 1."""
        if self.comm.rank == 0:
            dist.send(torch.zeros(int(os.environ["PACELINE_TEST_NUMBERS"])), group_dst=1, group=self.comm.group)
        elif self.comm.rank == 1:
            dist.recv(torch.zeros(100), group_src=0, group=self.comm.group)


class Silent(AfterBackward):
    """Incorrect: exchanges nothing, so that the replicas drift apart."""

    name: ClassVar[str] = "silent"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        """Leave every gradient as it is."""
