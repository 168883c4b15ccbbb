"""Buckets of gradients: flat tensors that are reduced as one, and the place of each parameter's gradient in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from paceline.comm.messages.flat_view import shaped_like
from paceline.strategies.base.strategy import NamedParameters


@dataclass(eq=False)
class Bucket:
    """Gradients that are reduced together, in one flat tensor."""

    number: int
    flat: Tensor
    slots: list[Slot]
    missing: int = 0
    """Number of gradients of this step that are not in the bucket yet."""


@dataclass(eq=False)
class Slot:
    """Place of one parameter's gradient in a bucket."""

    name: str
    parameter: nn.Parameter
    bucket: Bucket
    view: Tensor
    """View of the bucket for this gradient, with the parameter's memory layout."""
    sum_view: Tensor
    """View of the bucket's sum for this gradient, with a version counter of its own: it becomes `.grad`."""
    gradient: Tensor | None = None
    """Gradient of this step once it is in the bucket, else None. Later changes to it are not sent."""
    version: int = 0
    """PyTorch's version counter of the gradient when it was put into the bucket."""

    @property
    def is_unchanged(self) -> bool:
        """Whether the parameter's gradient is still the tensor that was put into the bucket, unmodified."""
        sent = self.gradient
        return sent is None or (self.parameter.grad is sent and sent._version == self.version)


def make_buckets(members: Sequence[NamedParameters], memory: Sequence[Tensor], sums: Sequence[Tensor]) -> list[Bucket]:
    """Return one bucket for each list of parameters, in the flat tensors `memory`.

    `sums` are the flat tensors that will hold the buckets' sums; they may be the same as `memory`.
    """
    buckets = []
    for number, (named, flat, flat_sum) in enumerate(zip(members, memory, sums, strict=True)):
        bucket = Bucket(number, flat, [])
        views, sum_views = _views(flat, named), _views(flat_sum, named)
        for (name, parameter), view, sum_view in zip(named, views, sum_views, strict=True):
            bucket.slots.append(Slot(name, parameter, bucket, view, sum_view.data))
        buckets.append(bucket)
    return buckets


def _views(flat: Tensor, parameters: NamedParameters) -> list[Tensor]:
    """Return the view of a flat tensor for each parameter, with the memory layout of the parameter's gradient."""
    parts = flat.split([parameter.numel() for _, parameter in parameters])
    return [shaped_like(part, parameter) for (_, parameter), part in zip(parameters, parts, strict=True)]
