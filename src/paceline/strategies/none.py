"""`none`: every rank trains alone, as the bound on what synchronising less could gain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from torch import nn

from paceline.comm.group import from_rank_0
from paceline.strategies.base.strategy import Strategy


class NoSync(Strategy):
    """Every rank trains on its share of the batch and tells nobody: the head-room bound, not a way to train.

    Idea
        The step time of `none` is that of a strategy whose communication costs nothing. The distance from any other
        strategy to it is all that a better one could gain. The replicas drift apart; the run ships rank 0's.

    Who sends what to whom
        rank 0: [share 0] -> gradient 0 -> step        (no arrows:
        rank 1: [share 1] -> gradient 1 -> step         that is the point)

    Cost
        Nothing on the wire, BatchNorm buffers included, unless --bn sync asks for it. step = forward + backward +
        optimiser, on a share of the batch.

    When to use it
        In a comparison, to see whether communication is worth improving at all.

    When not
        To train: each replica sees only its shares, so its gradient is noisier and the others' work is thrown away.
    """

    name: ClassVar[str] = "none"
    lossless = False
    exchanges: ClassVar[bool] = False

    def step(self, max_norm: float | None = None) -> None:
        self.update(max_norm)

    @contextmanager
    def agreed(self) -> Iterator[nn.Module]:
        with from_rank_0([*self.model.parameters(), *self.model.buffers()], self.comm):
            yield self.model
