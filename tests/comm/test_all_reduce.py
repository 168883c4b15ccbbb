"""Paceline's own all-reduces: the plain sum, bit-identical on all ranks, and the bytes of their plan."""

from __future__ import annotations

import pytest
import torch

from comm.all_reduces import DTYPES, MEMORY_ITEMS, MEMORY_KB, SEGMENTS_KB, SIZES, among_some, check, count_bytes, memory
from comm.messages.test_payload import planned
from paceline.comm.all_reduce import RECEIVES_AHEAD
from ranks import Pool
from registered import ALGORITHMS

pytestmark = pytest.mark.takes(9)

BYTES = [
    (1, torch.float32, 2048.0),
    (3, torch.float64, 2048.0),
    (1001, torch.float32, 0.5),
    (300_007, torch.bfloat16, 64.0),
]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ALGORITHMS)
class TestSums:
    """Sums over the ranks."""

    def test_of_any_size_in_any_segments(self, pool: Pool, name: str, ranks: int) -> None:
        cases = [(size, torch.float32, kb) for size in SIZES for kb in SEGMENTS_KB if size < 20 or kb >= 0.1]
        check(pool, name, ranks, [*cases, (1_000_003, torch.float32, 256.0)])

    def test_of_any_dtype(self, pool: Pool, name: str, ranks: int) -> None:
        check(pool, name, ranks, [(1003, dtype, 0.25) for dtype in DTYPES])

    def test_step_by_step(self, pool: Pool, name: str, ranks: int) -> None:
        """Messages run in the order that NCCL needs, but over Gloo."""
        check(pool, name, ranks, [(size, torch.float32, 0.25) for size in SIZES], backend="nccl")


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("members", [[2], [3, 0], [1, 3, 2]])
def test_some_ranks_in_any_order(pool: Pool, name: str, members: list[int]) -> None:
    total = sum(10.0**rank for rank in members)
    for rank, tensor in enumerate(pool.run(among_some, 4, name, members)):
        assert tensor.unique().tolist() == [total if rank in members else 10.0**rank]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_memory_is_kept_and_bounded(pool: Pool, name: str) -> None:
    for rank, (first, size, *later) in enumerate(pool.run(memory, 4, name)):
        assert later == [first, size] * 2
        adds = any(message.adds for message in ALGORITHMS[name].schedule(MEMORY_ITEMS, 4, rank, 4, MEMORY_KB).incoming)
        assert size == (RECEIVES_AHEAD * 4 * 1024 if adds else RECEIVES_AHEAD * 4), "one item if nothing is added"


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_kernel_counts_what_the_plan_says(pool: Pool, name: str, ranks: int) -> None:
    everywhere = pool.run(count_bytes, ranks, name, BYTES)
    for number, (size, dtype, segment_kb) in enumerate(BYTES):
        assert everywhere[0][number] == planned(ALGORITHMS[name].all_reduce(size, dtype.itemsize, ranks, segment_kb))
