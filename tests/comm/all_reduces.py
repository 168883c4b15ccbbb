"""Checks for every algorithm of `paceline.comm.all_reduce`, run on the ranks of the pool."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from comm.messages.test_payload import Matrix, counted, matrix_of
from paceline.comm import Comm
from paceline.comm.all_reduce import Scratch, all_reduce
from registered import ALGORITHMS

SIZES = [0, 1, 2, 3, 5, 17, 100, 4099]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64]
MEMORY_ITEMS, MEMORY_KB = 100_000, 4.0
SEGMENTS_KB = [0.001, 0.1, 2048.0]
"""The first is smaller than one item."""


def values(size: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Return numbers whose sum depends on the order of addition if the dtype rounds."""
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(100 * size + rank), dtype=torch.float64)
    return (numbers * 20).to(dtype) if dtype.is_floating_point or dtype.is_complex else (numbers.abs() * 9).to(dtype)


def reduced(comm: Comm, name: str, cases: list[tuple[int, torch.dtype, float]], backend: str) -> list[Tensor]:
    """Return the result of every case on this rank; all cases share one scratch memory."""
    scratch, results = Scratch(), []
    for size, dtype, segment_kb in cases:
        tensor = values(size, comm.rank, dtype)
        as_if = dataclasses.replace(comm, backend=backend)
        all_reduce(tensor, as_if, ALGORITHMS[name], segment_kb=segment_kb, scratch=scratch)
        results.append(tensor.view(torch.uint8) if dtype == torch.bfloat16 else tensor)
    return results


def plain_sum(size: int, dtype: torch.dtype, ranks: int) -> Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else dtype
    return torch.stack([values(size, rank, dtype).to(wide) for rank in range(ranks)]).sum(0, dtype=wide)


def check(pool: Any, name: str, ranks: int, cases: list[tuple[int, torch.dtype, float]], backend: str = "gloo") -> None:
    """Check that results are the plain sum, and bit-identical on all ranks."""
    everywhere = pool.run(reduced, ranks, name, cases, backend)
    for number, (size, dtype, segment_kb) in enumerate(cases):
        first, *others = (results[number].view(dtype) for results in everywhere)
        case = f"{size} × {dtype} in {segment_kb} KiB"
        expected = plain_sum(size, dtype, ranks).to(dtype)
        spare = 0.5 if dtype in (torch.bfloat16, torch.float16) else 1e-4 if dtype.itemsize * 2 == 8 else 1e-9
        torch.testing.assert_close(first, expected, rtol=1e-2, atol=spare, msg=case)
        for other in others:
            assert torch.equal(first.view(torch.uint8), other.view(torch.uint8)), case


def among_some(comm: Comm, name: str, ranks: list[int]) -> Tensor:
    """Return the sum over the members; other ranks do not call the all-reduce."""
    tensor = torch.full((101,), 10.0**comm.rank)
    if comm.rank in ranks:
        all_reduce(tensor, comm, ALGORITHMS[name], ranks, segment_kb=0.05)
    return tensor


def memory(comm: Comm, name: str) -> list[int]:
    """Return the address and the size of the scratch memory after each of three calls."""
    scratch, found = Scratch(), []
    for _ in range(3):
        all_reduce(torch.ones(MEMORY_ITEMS), comm, ALGORITHMS[name], segment_kb=MEMORY_KB, scratch=scratch)
        slots = scratch.slots(torch.ones(1), 1)
        found += [slots[0].data_ptr(), sum(slot.nbytes for slot in slots)]
    return found


def count_bytes(comm: Comm, name: str, cases: list[tuple[int, torch.dtype, float]]) -> list[Matrix]:
    """Return the bytes that the kernel counts for every case."""

    def matrix(size: int, dtype: torch.dtype, segment_kb: float) -> Matrix:
        tensor = torch.ones(size, dtype=dtype)
        return matrix_of(counted(comm, lambda: all_reduce(tensor, comm, ALGORITHMS[name], segment_kb=segment_kb)))

    return [matrix(*case) for case in cases]
