"""Fingerprint of samples or batches, to compare the data of ranks without sending it.

Floating-point values are compared up to rounding, because processors of different kinds may prepare the same data with
small differences. Everything else is compared exactly.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

TOLERANCE = 1e-5
"""Largest difference of projections of the same values, relative to their norm."""


MOST_VALUES = 1 << 16
TEXT = "str "
"""Beginning of the content of text."""
LARGEST = 1e100


class Leaf(msgspec.Struct, frozen=True):
    """Fingerprint of one tensor, array, number or text in a sample."""

    content: str
    """Type and shape and, unless the values are floating-point numbers, a checksum of them."""
    norm: float = 0.0
    projection: float = 0.0
    """Product with a fixed vector, which almost no other values share."""

    def matches(self, other: Leaf) -> bool:
        """Whether both are of the same values, up to rounding."""
        largest = TOLERANCE * max(self.norm, other.norm)
        return (
            self.content == other.content
            and abs(self.norm - other.norm) <= largest
            and abs(self.projection - other.projection) <= largest
        )


Fingerprint = dict[str, Leaf]
"""Leaves of a sample by their path in it, for example "1" for the second of a tuple."""


def fingerprint(value: Any) -> Fingerprint:
    """Return the fingerprint of a sample or a batch.

    Text is left out if there are values too: it may be the path of a file, which is another one on each host.
    """
    leaves = _leaves(value, "")
    values = {path: leaf for path, leaf in leaves.items() if not leaf.content.startswith(TEXT)}
    return leaves if all(path.endswith("length") for path in values) else values


def _leaves(value: Any, path: str) -> Fingerprint:
    if isinstance(value, Mapping):
        parts = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(str(number), part) for number, part in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    else:
        return {path: _leaf(value)}
    found = {f"{path}.length" if path else "length": Leaf(str(len(parts)))}
    for name, part in parts:
        found |= _leaves(part, f"{path}.{name}" if path else name)
    return found


def _leaf(value: Any) -> Leaf:
    if isinstance(value, Tensor):
        return _tensor_leaf(value)
    if isinstance(value, float):  # A number of numpy in float64 too.
        return _float_leaf("float", torch.tensor([value], dtype=torch.float64))
    if isinstance(value, np.ndarray | np.generic):
        kind = f"{value.dtype} {value.shape}"
        if value.dtype.kind == "f":
            return _float_leaf(kind, torch.from_numpy(np.array(value, dtype=np.float64).reshape(-1)))
        return Leaf(f"{kind} {_checksum(value.tobytes() if value.dtype.kind != 'O' else repr(value).encode())}")
    if isinstance(value, bool | int | str | bytes | None):
        return Leaf(f"{type(value).__name__} {_checksum(repr(value).encode())}")
    if hasattr(value, "tobytes"):  # An image of Pillow.
        return Leaf(f"{type(value).__name__} {getattr(value, 'size', '')} {_checksum(value.tobytes())}")
    return Leaf(type(value).__name__)  # Of an unknown type: its content is not compared.


def _tensor_leaf(tensor: Tensor) -> Leaf:
    kind = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return Leaf(kind)
    values = tensor.detach().reshape(-1)
    if values.is_floating_point():
        return _float_leaf(kind, values)
    values = values.resolve_conj().resolve_neg().cpu().contiguous()
    return Leaf(f"{kind} {_checksum(values.view(torch.uint8).numpy().tobytes())}")


def _float_leaf(kind: str, values: Tensor) -> Leaf:
    """Return the leaf of floating-point values; of many, only some are taken, at equal distances."""
    taken = values[:: 1 + len(values) // MOST_VALUES].cpu().double()
    # Values that are not finite would hide all others, and those near the largest number would overflow.
    taken = taken.nan_to_num(nan=1.0, posinf=2.0, neginf=-2.0).clamp(-LARGEST, LARGEST)
    numbers = torch.arange(len(taken), dtype=torch.float64)
    return Leaf(kind, float(taken.norm()), float(taken @ torch.cos(numbers * numbers + 1)))


def _checksum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
