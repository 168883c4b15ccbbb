"""Buckets of gradients: pieces of memory that travel as one, and where in them the gradient of each parameter is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.comm.flat_view import flat_view
from paceline.strategies.base.strategy import NamedParameters


@dataclass(eq=False)
class Bucket:
    """Gradients that travel together, in one piece of memory."""

    number: int
    flat: Tensor
    slots: list[Slot]
    missing: int = 0
    """Gradients of this step that are still to come."""


@dataclass(eq=False)
class Slot:
    """Where the gradient of one parameter goes."""

    name: str
    parameter: nn.Parameter
    bucket: Bucket
    view: Tensor
    """Its part of the bucket, laid out as the parameter is."""
    total: Tensor
    """Its part of the sum, which the optimiser is given."""
    gradient: Tensor | None = None
    """The parameter's gradient of this step, once it was put in; what becomes of it after that does not travel."""
    version: int = 0
    """Torch's count of writes into it, by then."""

    @property
    def is_unchanged(self) -> bool:
        """Whether the gradient is still the one that was put in."""
        sent = self.gradient
        return sent is None or (self.parameter.grad is sent and sent._version == self.version)

    @property
    def largest(self) -> float:
        """The largest number in the gradient that was put in, but for its sign."""
        assert self.gradient is not None
        return float(torch.linalg.vector_norm(self.gradient, torch.inf))


def make_buckets(members: Sequence[NamedParameters], memory: Sequence[Tensor], sums: Sequence[Tensor]) -> list[Bucket]:
    """Buckets for some parameters each, in flat memory that is given, with their sums in another or the same."""
    buckets = []
    for number, (inside, flat, added) in enumerate(zip(members, memory, sums, strict=True)):
        bucket = Bucket(number, flat, [])
        views, totals = _views(flat, inside), _views(added, inside)
        for (name, parameter), view, total in zip(inside, views, totals, strict=True):
            bucket.slots.append(Slot(name, parameter, bucket, view, total))
        buckets.append(bucket)
    return buckets


def _views(flat: Tensor, parameters: NamedParameters) -> list[Tensor]:
    """The part of a bucket for each parameter, in the memory layout that its gradient has too."""
    parts = flat.split([parameter.numel() for _, parameter in parameters])
    return [_laid_out_as(parameter, part) for (_, parameter), part in zip(parameters, parts, strict=True)]


def _laid_out_as(parameter: Tensor, part: Tensor) -> Tensor:
    if flat_view(parameter.detach()) is None:  # It has holes, or overlaps itself.
        return part.view(parameter.shape)
    return part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
