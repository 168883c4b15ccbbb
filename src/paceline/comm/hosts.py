"""Finds out which ranks of a run share a host, and so may share memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.measure.host import memory_id


def own_host() -> Tensor:
    """What names this rank's host, always of the same length, so that ranks can gather it."""
    return torch.frombuffer(bytearray(hashlib.sha256(memory_id().encode()).digest()), dtype=torch.uint8)


def hosts_of(names: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host, in the order of their first ones, from what each rank said of its own."""
    hosts: dict[bytes, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(bytes(name.tolist()), []).append(rank)
    return tuple(tuple(members) for members in hosts.values())
