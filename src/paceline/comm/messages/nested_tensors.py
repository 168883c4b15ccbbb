"""Tensors in nested values: the inputs, outputs and batches of a model, or the arguments of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield a tensor, or the tensors in lists, tuples and mappings, in their order."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from tensors_in(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)


def map_tensors(values: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return nested dicts, lists and tuples with each tensor replaced; other values are kept as they are."""
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, dict):
        return {key: map_tensors(value, function) for key, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(map_tensors(value, function) for value in values)
    return values


def memory_key(tensor: Tensor) -> Any:
    """Return a key that is equal for tensors that are one and the same view of the same memory."""
    if tensor.numel() == 0:  # It has no memory to share.
        return id(tensor)
    place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (*place, tuple(tensor.shape), tensor.stride())
