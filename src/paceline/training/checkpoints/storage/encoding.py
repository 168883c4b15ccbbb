"""Nested values as JSON and tensors: optimiser state, parameter groups, and whatever else a checkpoint keeps.

JSON has no tensors, tuples, infinite numbers, or keys that are not text; each of these becomes an object with a key
that begins with `$` (`records/checkpoint.py`). Nothing is pickled, so reading a checkpoint executes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.comm.messages.nested_tensors import memory_key
from paceline.errors import CheckpointError
from paceline.records.checkpoint import FLOAT, MARK, PAIRS, STRIDES, TENSOR, TUPLE
from paceline.training.checkpoints.storage.tensors import dense_strides, is_dense, unkept_kind, with_strides

DEEPEST = 100
"""Deepest nesting of values. It also ends the search in a value that contains itself."""
RESERVED_NAME = "__metadata__"
"""Name that a tensor in a safetensors file cannot have."""

Place = tuple[str, ...]
"""Keys that lead to a value, beginning with the name of its file's section."""


class ValueEncoder:
    """Encoder of values whose tensors are in one file. Tensors that are the same view of the same memory share one."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        """Tensors of the file by name, not copied."""
        self._names: dict[Any, str] = {}

    def encode(self, value: Any, place: Place, section: str) -> Any:
        """Return a value as JSON values; raise a CheckpointError that names what cannot be kept.

        `place` becomes the name of a tensor, and `section` is the name of the whole in errors, as in "the model".
        """
        if len(place) > DEEPEST:
            raise _unkept(f"is nested more than {DEEPEST} levels deep", place[:3], section)
        if isinstance(value, Tensor):
            return self._tensor(value, place, section)
        if isinstance(value, np.generic):  # Learning rates that numpy computed, for example.
            value = value.item()
        if value is None or isinstance(value, bool) or type(value) is int:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {FLOAT: repr(value)}
        if type(value) is str:
            return _text(value, place, section)
        if type(value) is tuple or isinstance(value, torch.Size):
            return {TUPLE: self._items(value, place, section)}
        if type(value) is list:
            return self._items(value, place, section)
        if isinstance(value, dict):
            return self._mapping(value, place, section)
        raise _unkept(f"is {_with_article(type(value).__name__)}", place, section)

    def _items(self, values: Iterable[Any], place: Place, section: str) -> list[Any]:
        return [self.encode(value, (*place, str(index)), section) for index, value in enumerate(values)]

    def _mapping(self, values: Mapping[Any, Any], place: Place, section: str) -> dict[str, Any]:
        encoded = {key: self.encode(value, (*place, str(key)), section) for key, value in values.items()}
        if all(type(key) is str and not key.startswith(MARK) for key in encoded):
            for key in encoded:
                _text(key, place, section)
            return encoded
        return {PAIRS: [[self.encode(key, place, section), value] for key, value in encoded.items()]}

    def _tensor(self, tensor: Tensor, place: Place, section: str) -> dict[str, Any]:
        kind = unkept_kind(tensor)
        if kind is not None:
            raise _unkept(f"is {kind}", place, section)
        key = memory_key(tensor)
        if key not in self._names:
            name = self._names[key] = self._free_name(_text("/".join(place), place, section))
            self.tensors[name] = tensor
        strides = dense_strides(tensor)
        return {TENSOR: self._names[key]} | ({STRIDES: strides} if strides is not None else {})

    def _free_name(self, name: str) -> str:
        """Return the name, or one with a number if it is taken: names of parameters may contain slashes."""
        free, number = name, 1
        while free in self.tensors or free == RESERVED_NAME:
            number += 1
            free = f"{name}#{number}"
        return free


class ValueDecoder:
    """Decoder of values whose tensors are in one file. Raises ValueError for JSON that no encoder wrote."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._decoded: dict[str, Tensor] = {}
        """Tensors with their strides. Tied names get one and the same tensor, as before."""

    def decode(self, value: Any) -> Any:
        """Return the value that was encoded."""
        if isinstance(value, list):
            return [self.decode(one) for one in value]
        if not isinstance(value, dict):
            return value
        if TENSOR in value:
            return self._tensor(value[TENSOR], value.get(STRIDES))
        if TUPLE in value:
            return tuple(self.decode(one) for one in _list(value[TUPLE]))
        if FLOAT in value:
            return _infinite(value[FLOAT])
        if PAIRS in value:
            return {self.decode(key): self.decode(one) for key, one in map(_pair, _list(value[PAIRS]))}
        return {key: self.decode(one) for key, one in value.items()}

    def _tensor(self, name: Any, strides: Any) -> Tensor:
        if not isinstance(name, str) or name not in self._tensors:
            raise ValueError(f"it names the tensor {name!r}, which its file does not have")
        if name not in self._decoded:
            tensor = self._tensors[name]
            if strides is not None:
                if not all(type(one) is int for one in _list(strides)) or not is_dense(tensor.shape, strides):
                    raise ValueError(f"the strides of {name} do not fit its shape")
                tensor = with_strides(tensor, strides)
            self._decoded[name] = tensor
        return self._decoded[name]


def _text(text: str, place: Place, section: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _unkept("contains text that is not valid Unicode", place, section) from None
    return text


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"it has {value!r} in place of a list")
    return value


def _pair(value: Any) -> tuple[Any, Any]:
    if not isinstance(value, list) or len(value) != 2 or isinstance(value[0], list):
        raise ValueError(f"it has {value!r} in place of a key and its value")
    return value[0], value[1]


def _infinite(text: Any) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError(f"it has {text!r} in place of nan, inf or -inf")
    return float(text)


def _unkept(found: str, place: Place, section: str) -> CheckpointError:
    name = "/".join(place).encode(errors="backslashreplace").decode()
    return CheckpointError(
        f"{section} cannot be kept in a checkpoint: {name} {found}.",
        hint="checkpoints keep dense tensors, numbers, text, lists, tuples and dicts; convert it to one of these, or "
        "train without checkpoints",
    )


def _with_article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
