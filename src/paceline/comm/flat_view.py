"""One-dimensional views of gradients, so that any dense memory layout goes on the wire without a copy."""

from __future__ import annotations

from torch import Tensor


def flat_view(tensor: Tensor) -> Tensor | None:
    """A view of a dense tensor's memory in its own order (a channels-last gradient too); None when it has holes.

    Ranks that run the same model hold gradients of the same layout, so element i means the same on all of them.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    ordered = tensor.permute(by_stride)
    return ordered.view(-1) if ordered.is_contiguous() else None
