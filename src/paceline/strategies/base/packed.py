"""Agreement after backward on gradients that are packed together: the base of strategies that bring an all-reduce."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.all_reduce.exchange import Scratch
from paceline.strategies.base.strategy import AfterBackward


class Packed(AfterBackward):
    """All gradients of one type become one tensor, which is summed over the ranks. Write `all_reduce` alone.

    They are copied together before and apart after it; the mean is taken on the way back. The memory is kept.
    """

    travel = "packed"

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.scratch = Scratch()
        self._memory: dict[torch.dtype, Tensor] = {}

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> None:
        """Replaces a one-dimensional tensor by its sum over the ranks, in place."""

    def agree(self, gradients: Sequence[Tensor]) -> None:
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients:
            by_type.setdefault(gradient.dtype, []).append(gradient)
        for members in by_type.values():
            together = self._pack(members)
            self.all_reduce(together)
            for part, gradient in zip(together.split([g.numel() for g in members]), members, strict=True):
                torch.div(part, self.comm.world_size, out=gradient)

    def close(self) -> None:
        self.scratch, self._memory = Scratch(), {}
        super().close()

    def _pack(self, gradients: Sequence[Tensor]) -> Tensor:
        """The gradients one behind the other; of unused parameters there may be fewer than in the step before."""
        items = sum(gradient.numel() for gradient in gradients)
        like = gradients[0]
        if like.dtype not in self._memory or len(self._memory[like.dtype]) < items:
            self._memory[like.dtype] = like.new_empty(items)
        together = self._memory[like.dtype][:items]
        torch.cat(list(gradients), out=together)
        return together
