"""Base class of strategies that copy all gradients into one tensor and all-reduce it after backward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.all_reduce import Scratch
from paceline.strategies.base.strategy import AfterBackward


class Packed(AfterBackward):
    """Base class of strategies that sum all gradients of one data type over the ranks as one tensor, after backward.

    Subclasses write only `all_reduce`. Before it the gradients are divided by the number of ranks and copied into one
    tensor; after it they are copied back. The memory is kept between steps.
    """

    sends = "packed"

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.scratch = Scratch()
        self._memory: dict[torch.dtype, Tensor] = {}

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a one-dimensional tensor with its sum over the ranks, in place."""

    def agree(self, gradients: Sequence[Tensor]) -> None:
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients:
            by_type.setdefault(gradient.dtype, []).append(gradient)
        for members in by_type.values():
            packed = self._pack(members)
            self.all_reduce(packed)
            torch._foreach_copy_(members, packed.split([gradient.numel() for gradient in members]))

    def close(self) -> None:
        self.scratch, self._memory = Scratch(), {}
        super().close()

    def _pack(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the gradients, divided by the number of ranks, as one tensor.

        They are divided before they are summed, since a sum may overflow in float16. With unused parameters there may
        be fewer than in the step before.
        """
        items = sum(gradient.numel() for gradient in gradients)
        like = gradients[0]
        if like.dtype not in self._memory or len(self._memory[like.dtype]) < items:
            self._memory[like.dtype] = like.new_empty(items)
        packed = self._memory[like.dtype][:items]
        parts = packed.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            torch.div(gradient, self.comm.world_size, out=part)
        return packed
