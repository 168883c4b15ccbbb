"""Copies to a GPU beside the training: complete before they are read, and kept until they were."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.workloads import gpu_copy
from paceline.workloads.gpu_copy import copy_to_gpu

DELAY_CYCLES = 100_000_000
"""Cycles of a GPU that take 50 ms or more, far longer than a copy of a small tensor."""
WRONG = -7.0
SIZE = 1 << 16


def delay_copies(gpu: torch.device) -> None:
    """Let the stream of the copies wait, and fill memory that it will use with wrong values."""
    with torch.cuda.stream(gpu_copy._copy_stream(gpu)):
        for size in (1, 64, SIZE):
            torch.full((size,), WRONG, device=gpu)
        torch.cuda._sleep(DELAY_CYCLES)


@pytest.mark.gpu
def test_a_copy_that_begins_late_is_read_after_its_end() -> None:
    gpu, values = torch.device("cuda", 0), torch.arange(float(SIZE))
    copy_to_gpu(values, gpu)
    torch.cuda.synchronize()
    delay_copies(gpu)
    assert torch.equal(copy_to_gpu(values, gpu).cpu(), values)


@pytest.mark.gpu
def test_a_copy_is_kept_until_it_was_read() -> None:
    """The stream that trains is late; meanwhile its batch is released on the host and the next one is copied."""
    gpu, values = torch.device("cuda", 0), torch.arange(float(SIZE))
    pinned = [(values + step).pin_memory() for step in range(3)]
    copy_to_gpu(values, gpu)
    torch.cuda.synchronize()
    read: list[Tensor] = []
    for batch in pinned:
        copied = copy_to_gpu(batch, gpu)
        torch.cuda._sleep(DELAY_CYCLES)
        read.append(copied + 0)
        del copied
    for step, found in enumerate(read):
        assert torch.equal(found.cpu(), values + step), f"batch {step} was overwritten before it was read"


@pytest.mark.gpu
def test_the_host_does_not_wait_for_earlier_work() -> None:
    gpu = torch.device("cuda", 0)
    pinned = torch.ones(SIZE).pin_memory()
    copy_to_gpu(pinned, gpu)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(DELAY_CYCLES)
    done.record()
    copy_to_gpu(pinned, gpu)
    assert not done.query(), "the copy has waited for the stream that trains"
    torch.cuda.synchronize()
