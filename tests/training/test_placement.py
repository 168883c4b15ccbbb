"""Tests of the choice of the backend from the GPUs of the ranks."""

from __future__ import annotations

import pytest
import torch

from paceline.comm import Comm
from paceline.training.placement import NO_GPU, gather_gpu_ids, one_gpu_each
from ranks import Pool

ONE, OTHER = b"1" * 16, b"2" * 16


@pytest.mark.parametrize(
    ("marks", "each"),
    [
        ([ONE], True),
        ([ONE, OTHER], True),
        ([ONE, OTHER, ONE], False),
        ([ONE, NO_GPU], False),
        ([NO_GPU], False),
    ],
)
def test_gpus_of_their_own(marks: list[bytes], each: bool) -> None:
    assert one_gpu_each(marks) is each


def marks_of_all(comm: Comm) -> list[bytes]:
    return gather_gpu_ids(torch.full((16,), comm.rank, dtype=torch.uint8))


def test_ranks_know_each_others_gpus(pool: Pool) -> None:
    expected = [bytes([rank]) * 16 for rank in range(4)]
    assert pool.run(marks_of_all, 4) == [expected] * 4
