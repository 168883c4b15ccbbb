"""A user's incorrect strategy, for scripts."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from paceline import AfterBackward


class Sums(AfterBackward):
    """Incorrect: the sum, without the division."""

    name = "sums"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        """Sum the gradients."""
        for gradient in gradients:
            dist.all_reduce(gradient, group=self.comm.group)
