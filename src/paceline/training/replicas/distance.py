"""Distance between replicas of a model whose checksums differ: which tensors differ, on which ranks, how much."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.group import Comm
from paceline.comm.messages.json_messages import gather_typed
from paceline.comm.messages.tensor_layout import TensorLayout, first_difference, layout_of
from paceline.errors import ReplicaError

_BLOCK = 2**22
"""Numbers that are compared at a time, in float64."""


@dataclass(frozen=True)
class TensorDifference:
    """Difference of one tensor between the ranks."""

    name: str
    ranks: tuple[int, ...]
    """Ranks whose tensor is not that of most ranks; all ranks if no value is that of most."""
    distance: float
    """Largest distance of a rank's tensor from that of most ranks (or of rank 0), relative to the larger norm."""


def measure_differences(tensors: Mapping[str, Tensor], checksums: Sequence[int], comm: Comm) -> list[TensorDifference]:
    """Return the tensors whose values differ between ranks, largest distance first; called on every rank.

    `checksums` are those of the tensors. Only tensors whose checksums differ are sent. Their values may still be equal:
    0 and −0, or another layout in memory.
    """
    _check_same_tensors(tensors, comm)
    everyone = gather_typed(list(checksums), list[int], comm.control)
    references: dict[str, int] = {}
    ranks: dict[str, tuple[int, ...]] = {}
    for number, name in enumerate(tensors):
        by_rank = [own[number] for own in everyone]
        if len(set(by_rank)) > 1:
            references[name], ranks[name] = _majority(by_rank)
    distances = [_distance(tensors[name], at, comm) for name, at in references.items()]
    largest = torch.stack(comm.control.gather(torch.tensor(distances, dtype=torch.float64))).amax(0).tolist()
    found = [TensorDifference(name, ranks[name], far) for name, far in zip(references, largest, strict=True) if far]
    return sorted(found, key=lambda difference: difference.distance, reverse=True)


def _check_same_tensors(tensors: Mapping[str, Tensor], comm: Comm) -> None:
    """Raise, on all ranks, if they have tensors of different names, shapes or dtypes."""
    own = layout_of((name, tensor.detach()) for name, tensor in tensors.items())
    found = first_difference(dict(enumerate(gather_typed(own, list[TensorLayout], comm.control))))
    if found:
        raise ReplicaError(
            f"the model is not the same on all ranks: {found}.",
            hint="build and change the model in the same way on every rank",
        )


def _majority(checksums: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return a rank that has the value of most ranks, and the ranks that differ from it.

    Without a majority it is rank 0, and all ranks are returned: it is not known which of them is right.
    """
    checksum, count = Counter(checksums).most_common(1)[0]
    if 2 * count <= len(checksums):
        return 0, tuple(range(len(checksums)))
    return checksums.index(checksum), tuple(rank for rank, own in enumerate(checksums) if own != checksum)


@torch.no_grad()
def _distance(own: Tensor, reference: int, comm: Comm) -> float:
    """Return the distance of this rank's tensor from that of the reference rank, relative to the larger norm."""
    values = own.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    theirs = values.clone()
    dist.broadcast(theirs.view(torch.uint8), group_src=reference, group=comm.control.group)
    apart, norm, other_norm = 0.0, 0.0, 0.0
    for mine, other in zip(values.split(_BLOCK), theirs.split(_BLOCK), strict=True):
        a, b = _as_doubles(mine), _as_doubles(other)
        # Infinities and NaN at the same place are equal: the divergence of a loss is the same on all ranks.
        same = (a == b) | (a.isnan() & b.isnan())
        apart += float(torch.where(same, 0.0, a - b).square().sum())
        norm += float(a.nan_to_num(0.0, 0.0, 0.0).square().sum())
        other_norm += float(b.nan_to_num(0.0, 0.0, 0.0).square().sum())
    if apart == 0:
        return 0.0
    relative = math.sqrt(apart) / (math.sqrt(max(norm, other_norm)) or 1.0)
    return relative if math.isfinite(relative) else math.inf


def _as_doubles(values: Tensor) -> Tensor:
    return (torch.view_as_real(values) if values.is_complex() else values).double()
