"""`allreduce`: one blocking all_reduce per parameter, after backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.strategies.base.strategy import AfterBackward


class AllReduce(AfterBackward):
    """Every rank divides its gradients by the number of ranks; then an all-reduce sums each of them over all ranks.

    Idea
        All ranks do the same work. Gloo and NCCL pass chunks around a ring, so every link carries the same number of
        bytes, and the bytes per rank hardly grow with the number of ranks. But each parameter costs the latency of a
        whole ring, and no gradient is sent during backward.

    Who sends what to whom (per parameter, of M bytes)
        rank 0 ──▶ rank 3 ──▶ rank 2 ──▶ rank 1 ──▶ rank 0     2(p−1) messages of M/p bytes on every arrow

    Cost
        2(p−1)α + 2(p−1)/p·Mβ + (p−1)/p·Mγ per parameter.

    When to use it
        As the simplest correct strategy, and to measure what `ddp` gains by buckets and overlap.

    When not to use it
        With many small parameters (the latencies add up) or on a slow link (nothing overlaps): use `ddp`.

    Source
        Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """

    name: ClassVar[str] = "allreduce"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        torch._foreach_div_(list(gradients), self.comm.world_size)  # First, since a sum may overflow in float16.
        for gradient in gradients:
            dist.all_reduce(gradient, group=self.comm.group)
