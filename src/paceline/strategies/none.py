"""`none`: ranks do not communicate; the upper bound on the speed of any strategy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from torch import nn
from torch.amp import GradScaler

from paceline.comm.group import from_rank_0
from paceline.strategies.base.scaling import scaler_argument
from paceline.strategies.base.strategy import Strategy


class NoSync(Strategy):
    """Every rank trains on its share of the batch without communication: an upper bound on speed, not a way to train.

    Idea
        The step time of `none` is that of a strategy whose communication takes no time. The difference between another
        strategy's step time and this one is the most that a better strategy could save. The replicas diverge; the run
        keeps the weights of rank 0.

    Who sends what to whom
        rank 0: [share 0] -> gradient 0 -> step        (no messages
        rank 1: [share 1] -> gradient 1 -> step         between ranks)

    Cost
        No communication, not even of BatchNorm buffers, unless --bn sync is set. Step time = forward + backward +
        optimiser, on a share of the batch.

    When to use it
        In a comparison, to measure how much time faster communication could save.

    When not to use it
        To train: each replica sees only its own shares, so its gradients are noisier, and the work of all other ranks
        is discarded.
    """

    name: ClassVar[str] = "none"
    supports = Strategy.supports | {"cuda_graph"}
    lossless = False
    exchanges: ClassVar[bool] = False

    def step(self, max_norm: float | None = None, scaler: GradScaler | None = None) -> None:
        self.update(max_norm, **scaler_argument(scaler))

    @contextmanager
    def agreed(self) -> Iterator[nn.Module]:
        with from_rank_0(list(self.model.parameters()), self.comm):  # The training loop handles buffers.
            yield self.model
