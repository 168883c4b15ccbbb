"""Peak memory counts from the last reset."""

from __future__ import annotations

import sys

import pytest
import torch

from paceline.measure.memory import peak_bytes, reset_peak

CPU = torch.device("cpu")
MB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_small_run_after_a_large_one_has_a_small_peak() -> None:
    assert reset_peak(CPU)
    start = peak_bytes(CPU)
    large = torch.ones(200 * MB // 4)
    with_large = peak_bytes(CPU)
    del large
    assert reset_peak(CPU)
    small = torch.ones(20 * MB // 4)
    with_small = peak_bytes(CPU)
    assert start is not None
    assert with_large is not None
    assert with_small is not None
    assert with_large - start > 190 * MB
    assert with_small - start < 100 * MB
    assert small.sum() == 20 * MB // 4
