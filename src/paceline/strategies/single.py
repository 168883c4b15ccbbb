"""`single`: one process trains on the whole batch."""

from __future__ import annotations

from typing import ClassVar

from paceline.strategies.base.strategy import Role, Strategy


class Single(Strategy):
    """One process trains on the whole global batch; other ranks, if there are any, stay idle.

    Idea
        Nothing to agree on. It is the baseline of every speed-up, and with the same batch and seed the reference for
        every loss. It gets what one host has: all usable cores of that host, or one GPU.

    Who sends what to whom
        rank 0: [whole batch] -> gradient -> step
        others: idle

    Cost
        Nothing on the wire. step = forward + backward + optimiser, on the whole batch.

    When to use it
        When the model trains fast enough on one device, and always as the baseline.

    When not
        Once a second device stands idle and the batch is large enough to share.
    """

    name: ClassVar[str] = "single"

    def roles(self, world_size: int) -> list[Role]:
        return [Role.WORKER] + [Role.IDLE] * (world_size - 1)

    def step(self, max_norm: float | None = None) -> None:
        self.update(max_norm)
