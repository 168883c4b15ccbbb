"""Strategies of a user's own, one of them wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from paceline import AfterBackward


class Sums(AfterBackward):
    """Forgets to divide."""

    name = "sums"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        """Adds only."""
        for gradient in gradients:
            dist.all_reduce(gradient, group=self.comm.group)
