"""`allreduce`: one blocking all_reduce per parameter, after backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.strategies.base.strategy import AfterBackward


class AllReduce(AfterBackward):
    """Every rank ends up with the sum of all gradients, one parameter after the other, and divides it.

    Idea
        No rank is special. Gloo and NCCL pass chunks around a ring, so every link carries the same, and the bytes per
        rank hardly grow with the number of ranks. But each parameter pays the latency of a whole ring, and nothing is
        sent while backward computes.

    Who sends what to whom (per parameter, of M bytes)
        rank 0 ──▶ rank 3 ──▶ rank 2 ──▶ rank 1 ──▶ rank 0     2(p−1) rounds of M/p bytes on every arrow

    Cost
        2(p−1)α + 2(p−1)/p·Mβ + (p−1)/p·Mγ per parameter.

    When to use it
        As the plainest right way, and to see what `ddp` gains by buckets and overlap.

    When not
        With many small parameters (latency adds up) or a slow link (nothing overlaps): use `ddp`.

    Source
        Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """

    name: ClassVar[str] = "allreduce"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        for gradient in gradients:
            dist.all_reduce(gradient, group=self.comm.group)
        torch._foreach_div_(list(gradients), self.comm.world_size)
