"""Tests of the checksums of tensors: every bit and every position counts, in every dtype and memory layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from paceline.training.replicas import checksums as module
from paceline.training.replicas.checksums import checksums, dense, integer_hash

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


def on_cpu(tensor: Tensor) -> int:
    return checksums([tensor])[0]


def as_on_gpu(tensor: Tensor) -> int:
    return int(integer_hash(dense(tensor)))


KINDS: Sequence[Callable[[Tensor], int]] = (on_cpu, as_on_gpu)


def numbers(dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    values = torch.randn(12, 6, 2, 3) * 3
    return values > 0 if dtype is torch.bool else values.to(dtype)


@pytest.mark.parametrize("checksum", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bit_and_the_order_count(checksum: Callable[[Tensor], int], dtype: torch.dtype) -> None:
    tensor = numbers(dtype)
    before = checksum(tensor)
    assert checksum(tensor.clone()) == before
    flipped = tensor.clone()
    flipped.view(-1).view(torch.uint8)[77] ^= 1
    assert checksum(flipped) != before
    if dtype.is_floating_point:
        assert checksum(-tensor) != before, "the sign bits of an even number of values"
    swapped = tensor.clone()
    first, last = 0, int((tensor.view(-1) != tensor.view(-1)[0]).nonzero()[-1])
    swapped.view(-1)[[first, last]] = swapped.view(-1)[[last, first]]
    assert checksum(swapped) != before


@pytest.mark.parametrize("checksum", KINDS)
def test_layouts(checksum: Callable[[Tensor], int]) -> None:
    tensor = numbers(torch.float32)
    last = tensor.to(memory_format=torch.channels_last)
    assert checksum(last) == checksum(last.clone())
    with_gaps = torch.zeros(12, 6, 2, 5)[..., :3].copy_(tensor)
    assert checksum(with_gaps) == checksum(tensor)
    assert checksum(torch.ones(1).expand(4)) == checksum(torch.ones(4))
    assert checksum(torch.zeros(0, 3)) == checksum(torch.zeros(0, 3))
    assert checksum(torch.tensor(2.0)) != checksum(torch.tensor(3.0))
    assert checksum(nn.Parameter(tensor)) == checksum(tensor)
    conjugated = numbers(torch.complex64).conj()
    assert checksum(conjugated) == checksum(conjugated.resolve_conj()) != checksum(conjugated.conj())


@pytest.mark.parametrize("checksum", KINDS)
def test_nan_equals_itself(checksum: Callable[[Tensor], int]) -> None:
    assert checksum(torch.full((3,), torch.nan)) == checksum(torch.full((3,), torch.nan))


def test_the_integer_hash_tells_blocks_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 8)
    module._factors.cache_clear()
    tensor = numbers(torch.float32).view(-1)
    swapped = torch.cat([tensor[8:16], tensor[:8], tensor[16:]])
    assert as_on_gpu(swapped) != as_on_gpu(tensor)
    assert as_on_gpu(tensor[:20]) != as_on_gpu(tensor[:24])
    module._factors.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_computes_the_integer_hash(dtype: torch.dtype) -> None:
    tensor = numbers(dtype)
    device = torch.device("cuda")
    assert checksums([tensor.to(device), torch.zeros(0, device=device), tensor]) == [
        as_on_gpu(tensor) % 2**64,
        as_on_gpu(torch.zeros(0)) % 2**64,
        on_cpu(tensor),
    ]
