"""Layout of named tensors that ranks exchange as packed bytes: each rank must hold the same ones, in the same order.

A packed message has no marks between its tensors. If one of them differs in size on one rank, all that follow would
receive the bytes of others, and Gloo accepts a message that is too short without an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.comm.control import ControlChannel
from paceline.comm.messages.json_messages import gather_typed
from paceline.errors import WorkloadError


class TensorLayout(msgspec.Struct, frozen=True, array_like=True):
    """Name, type and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool = False

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorLayout:
        """Return the layout of a tensor."""
        if is_lazy(tensor):
            raise WorkloadError(
                f"{name} has no shape yet: its layer is lazy, and no input has passed through it.",
                hint="run one forward pass before training starts",
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name, dtype, tuple(tensor.shape), tensor.requires_grad)


Layout = Sequence[TensorLayout]


def check_same_model(model: nn.Module, control: ControlChannel) -> None:
    """Raise, on all ranks, an error that names the first parameter or buffer in which the ranks' models differ."""
    own = layout_of([*model.named_parameters(), *model.named_buffers()])
    checksums = control.gather(torch.tensor([_checksum(own)]))
    if len({int(checksum) for checksum in checksums}) > 1:
        found = first_difference(dict(enumerate(gather_typed(own, list[TensorLayout], control))))
        raise WorkloadError(
            f"the ranks have different models: {found}.",
            hint="create the same model on every rank; only the values of its weights may differ",
        )


def layout_of(named: Iterable[tuple[str, Tensor]]) -> list[TensorLayout]:
    """Return the layout of named tensors."""
    return [TensorLayout.of(name, tensor) for name, tensor in named]


def first_difference(ranks: Mapping[int, Layout]) -> str:
    """Return in words the first difference between the ranks' layouts; empty if there is none."""
    (first, expected), *others = ranks.items()
    for rank, found in others:
        if found != expected:
            return _difference(first, expected, rank, found)
    return ""


def _difference(first: int, expected: Layout, rank: int, found: Layout) -> str:
    for names, layout, has, lacks in (
        ({one.name for one in found}, expected, first, rank),
        ({one.name for one in expected}, found, rank, first),
    ):
        missing = [one.name for one in layout if one.name not in names]
        if missing:
            return f"{missing[0]} exists on rank {has}, but not on rank {lacks}"
    one, other = next((a, b) for a, b in zip(expected, found, strict=True) if a != b)
    if one.name != other.name:
        return f"{one.name} on rank {first} is at the place of {other.name} on rank {rank}"
    if one.shape != other.shape:
        return f"{one.name} has shape {one.shape} on rank {first} and {other.shape} on rank {rank}"
    if one.dtype != other.dtype:
        return f"{one.name} is {one.dtype} on rank {first} and {other.dtype} on rank {rank}"
    trains, frozen = (first, rank) if one.requires_grad else (rank, first)
    return f"{one.name} has requires_grad=True on rank {trains} and False on rank {frozen}"


def _checksum(layout: Layout) -> int:
    digest = hashlib.blake2b(msgspec.json.encode(layout), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)
