"""Checksums of tensors: replicas with the same bits have the same checksums, and a single changed bit changes one.

On CPUs it is xxh3 over the tensor's memory. On GPUs it is a multilinear hash in 64-bit integers: the sum of all words,
each times an odd number that depends on its position. An xor or a plain sum would not see values in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import xxhash
from torch import Tensor

from paceline.comm.messages.flat_view import flat_view

_BLOCK = 2**20
"""Words per block of the hash on GPUs: a block's products take 8 MiB."""
_MOST_BLOCKS = 2**16
"""Most blocks of a tensor, which would be 256 GiB of float32."""
_WORDS = {1: torch.uint8, 2: torch.int16}
"""Integer type to read items of one or two bytes as; larger ones are read as words of four. In words of eight, the sign
bits of two float64 would cancel in a sum modulo 2^64."""


@torch.no_grad()
def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Return a 64-bit checksum of each tensor's values. A GPU is waited for once, after its last tensor."""
    found: list[int] = [0] * len(tensors)
    on_device: dict[torch.device, list[int]] = {}
    sums: dict[torch.device, list[Tensor]] = {}
    for number, tensor in enumerate(tensors):
        flat = dense(tensor)
        if flat.device.type == "cpu":
            found[number] = xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy().data)
        else:
            on_device.setdefault(flat.device, []).append(number)
            sums.setdefault(flat.device, []).append(integer_hash(flat))
    for device, numbers in on_device.items():
        for number, value in zip(numbers, torch.stack(sums[device]).tolist(), strict=True):
            found[number] = value % 2**64
    return found


def dense(tensor: Tensor) -> Tensor:
    """Return the values as a one-dimensional tensor, which shares the memory unless that has gaps."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = flat_view(plain)
    return plain.contiguous().view(-1) if flat is None else flat


def integer_hash(flat: Tensor) -> Tensor:
    """Return the hash of a one-dimensional tensor as a scalar on its device, without waiting for it."""
    words = flat.view(_WORDS.get(flat.element_size(), torch.int32))
    factors = _factors(flat.device, _BLOCK, seed=0)
    sums: list[Tensor] = [(block * factors[: len(block)]).sum() for block in words.split(_BLOCK)]
    if len(sums) == 1:
        return sums[0]
    products = torch.stack(sums) * _factors(flat.device, _MOST_BLOCKS, seed=1)[: len(sums)]
    return products.sum()


@cache
def _factors(device: torch.device, count: int, seed: int) -> Tensor:
    return torch.from_numpy(_odd_numbers(count, seed)).to(device)


def _odd_numbers(count: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return odd 64-bit numbers, by splitmix64, so that they are the same on every machine."""
    state = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray[tuple[int], np.dtype[np.int64]] = ((state ^ (state >> np.uint64(31))) | np.uint64(1)).view(
        np.int64
    )
    return mixed
