"""`single`: one process trains on the whole batch."""

from __future__ import annotations

from typing import ClassVar

from torch.amp import GradScaler

from paceline.strategies.base.scaling import scaler_argument
from paceline.strategies.base.strategy import Role, Strategy


class Single(Strategy):
    """One process trains on the whole global batch; all other ranks are idle.

    Idea
        There are no gradients to synchronise. It is the baseline of every speed-up and, with the same batch and seed,
        the reference for every loss. It uses all usable cores of one host, or one GPU.

    Who sends what to whom
        rank 0: [whole batch] -> gradient -> step
        others: idle

    Cost
        No communication. Step time = forward + backward + optimiser, on the whole batch.

    When to use it
        If the model trains fast enough on one device, and in every comparison as the baseline.

    When not to use it
        If a second device is available and the batch is large enough to split.
    """

    name: ClassVar[str] = "single"
    supports = Strategy.supports | {"cuda_graph"}

    def roles(self, world_size: int) -> list[Role]:
        return [Role.WORKER] + [Role.IDLE] * (world_size - 1)

    def step(self, max_norm: float | None = None, scaler: GradScaler | None = None) -> None:
        self.update(max_norm, **scaler_argument(scaler))
