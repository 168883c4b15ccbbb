"""Numbers are read exactly, whatever they are; those on a GPU in one transfer per dtype."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from paceline.training.recording.readback import read_numbers

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool]


def numbers(device: str) -> list[Any]:
    """Return values of all kinds that a step may report."""
    values: list[Any] = [2.5, 7, torch.tensor(1 / 3, dtype=torch.float64), torch.tensor([0.5])]
    for dtype in DTYPES:
        values += [torch.tensor(3, dtype=dtype, device=device), torch.tensor([[1]], dtype=dtype, device=device)]
    for value in (math.inf, -math.inf, 0.1, 1e-45):
        values.append(torch.tensor(value, device=device))
    values.append(torch.tensor(2**53 + 1, device=device))
    values.append(torch.tensor(0.1, dtype=torch.float64, device=device))
    return values


def check(device: str) -> None:
    values = numbers(device)
    assert read_numbers(values) == [v.item() if isinstance(v, torch.Tensor) else v for v in values]
    assert math.isnan(read_numbers([1, torch.tensor(math.nan, device=device)])[1])
    assert read_numbers([]) == []


def test_numbers_of_all_kinds() -> None:
    check("cpu")


@pytest.mark.gpu
def test_numbers_on_a_gpu() -> None:
    check("cuda")


@pytest.mark.gpu
def test_reading_does_not_wait_for_later_work() -> None:
    """A completed loss is read while the device is busy with later work."""
    done = torch.tensor(4.0, device="cuda")
    read_numbers([done] * 3)  # Loads its kernels, which would wait for the device.
    torch.cuda.synchronize()
    end = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # About a second.
    end.record()
    assert read_numbers([done] * 3) == [4.0] * 3
    assert not end.query()
    torch.cuda.synchronize()
