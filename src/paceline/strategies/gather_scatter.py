"""`gather_scatter`: rank 0 gathers the gradients and scatters their mean, one parameter at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.strategies.base.strategy import AfterBackward


class GatherScatter(AfterBackward):
    """Rank 0 gathers the gradients of all ranks, averages them and scatters the mean, one parameter at a time.

    Idea
        The simplest scheme: one rank computes the mean, as a sum of gradients that each rank has divided by the number
        of ranks. Every byte passes through rank 0, so its link is the
        bottleneck, and the load on it grows with the number of ranks.

    Who sends what to whom (per parameter, of M bytes)
        rank 1 ──g1──▶             rank 0 ──mean──▶ rank 1
        rank 2 ──g2──▶ rank 0      rank 0 ──mean──▶ rank 2
        rank 3 ──g3──▶ adds        rank 0 ──mean──▶ rank 3

    Cost
        2(p−1)(α + Mβ) + (p−1)Mγ per parameter: rank 0 moves 2(p−1)M bytes, every other rank 2M.

    When to use it
        To learn, and as the slow end of a comparison.

    When not to use it
        For training. `allreduce` moves only 2(p−1)/p·M bytes through each rank.
    """

    name: ClassVar[str] = "gather_scatter"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        comm = self.comm
        is_root = comm.rank == 0
        torch._foreach_div_(list(gradients), comm.world_size)  # First, since a sum may overflow in float16.
        for gradient in gradients:
            gathered = [torch.empty_like(gradient) for _ in range(comm.world_size)] if is_root else None
            dist.gather(gradient, gathered, group_dst=0, group=comm.group)
            mean = None
            if gathered is not None:
                total = gathered[0]
                for other in gathered[1:]:
                    total += other
                mean = [total] * comm.world_size
            dist.scatter(gradient, mean, group_src=0, group=comm.group)
