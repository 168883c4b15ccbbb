"""One-dimensional views of tensors and back, so that any dense memory layout is sent without a copy."""

from __future__ import annotations

from torch import Tensor


def flat_view(tensor: Tensor) -> Tensor | None:
    """Return a one-dimensional view of a dense tensor's memory in storage order; None if the memory has gaps.

    This includes channels-last gradients. Ranks that train the same model hold gradients of the same layout, so element
    i is the same on all ranks.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    ordered = tensor.permute(by_stride)
    return ordered.view(-1) if ordered.is_contiguous() else None


def shaped_like(flat: Tensor, like: Tensor) -> Tensor:
    """Return a view of a flat tensor with the shape of another, and its memory layout if that has no gaps."""
    if flat_view(like.detach()) is None:
        return flat.view(like.shape)
    return flat.as_strided(like.shape, like.stride(), flat.storage_offset())
