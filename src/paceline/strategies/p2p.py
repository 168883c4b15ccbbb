"""`p2p`: the traffic of `gather_scatter`, written with isend and irecv."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from paceline.comm.messages.typed import irecv, isend
from paceline.strategies.base.strategy import AfterBackward


class PointToPoint(AfterBackward):
    """Every rank sends its gradient to rank 0 and receives the mean, in point-to-point messages.

    Idea
        `gather_scatter` without collectives. Each rank divides its gradient by the number of ranks. Rank 0 posts all
        receives at once, so messages may arrive in any order. It adds them in rank order, so the mean is bitwise equal
        to that of `gather_scatter`. Then it posts all sends at once.

    Who sends what to whom (per parameter, of M bytes)
        rank r: isend(g_r → 0) ........ irecv(mean ← 0)
        rank 0: irecv(g_1), irecv(g_2), … wait, add, isend(mean → 1), isend(mean → 2), … wait

    Cost
        2(p−1)(α + Mβ) + (p−1)Mγ per parameter; all messages use rank 0's link.

    When to use it
        To learn what a collective does internally.

    When not to use it
        For training: rank 0 is the same bottleneck as in `gather_scatter`.
    """

    name: ClassVar[str] = "p2p"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        exchange = self._add_and_return if self.comm.rank == 0 else self._send_and_receive
        torch._foreach_div_(list(gradients), self.comm.world_size)  # First, since a sum may overflow in float16.
        for gradient in gradients:
            exchange(gradient)

    def _add_and_return(self, gradient: Tensor) -> None:
        comm, others = self.comm, range(1, self.comm.world_size)
        received = {rank: torch.empty_like(gradient) for rank in others}
        arrivals = {rank: irecv(received[rank], rank, comm) for rank in others}
        for rank in others:
            arrivals[rank].wait()
            gradient += received[rank]
        for departure in [isend(gradient, rank, comm) for rank in others]:
            departure.wait()

    def _send_and_receive(self, gradient: Tensor) -> None:
        isend(gradient, 0, self.comm).wait()
        irecv(gradient, 0, self.comm).wait()
