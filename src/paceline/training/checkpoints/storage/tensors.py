"""Tensors of a checkpoint: which ones a file can keep, and their layout in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

KEPT_DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    }
)
"""Dtypes that safetensors both writes and reads."""


def unkept_kind(tensor: Tensor) -> str | None:
    """Return the kind of a tensor that a checkpoint cannot keep, as in "a sparse tensor"; None if it can be kept."""
    if type(tensor) not in (Tensor, nn.Parameter):  # A subclass has more than its data, such as a DTensor's placement.
        return f"a tensor of class {type(tensor).__name__}"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout != torch.strided:
        return "a sparse tensor" if "sparse" in str(tensor.layout) else f"a tensor of layout {tensor.layout}"
    if tensor.is_quantized:
        return "a quantised tensor"
    if tensor.is_meta:
        return "a tensor without data (on the device meta)"
    if tensor.dtype not in KEPT_DTYPES:
        return f"a tensor of {dtype_name(tensor.dtype)}"
    return None


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, as in "float32"."""
    return str(dtype).removeprefix("torch.")


def dense_strides(tensor: Tensor) -> list[int] | None:
    """Return the strides of a tensor whose memory is dense but not in the order of its dimensions; None for others.

    A tensor with gaps or overlaps in its memory, such as a slice or an expanded one, becomes contiguous in a file.
    """
    strides = tensor.stride()
    if (
        tensor.numel() == 0
        or strides == torch.empty(tensor.shape, device="meta").stride()
        or not is_dense(tensor.shape, strides)
    ):
        return None
    return list(strides)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements with these strides fill their memory without gaps or overlaps."""
    if len(shape) != len(strides) or any(stride < 0 for stride in strides):
        return False
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def with_strides(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a copy of a contiguous tensor with other strides, which must be dense."""
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def on_disk(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as a file has them: on the CPU, contiguous, conjugation and negation carried out.

    Each has its own memory, as safetensors requires, which is that of the original if possible.
    """
    found, used = {}, set[int]()
    for name, tensor in tensors.items():
        kept = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        storage = kept.untyped_storage()
        if storage.nbytes() != kept.nbytes or storage.data_ptr() in used:
            kept = kept.clone()
        used.add(kept.untyped_storage().data_ptr())
        found[name] = kept
    return found
