"""Tensors in nested values: the inputs, outputs and batches of a model, or the arguments of a call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
