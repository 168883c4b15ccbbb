"""Tests of up-scaling against PyTorch's."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.workloads.data.upscale import upscale


@settings(deadline=None)
@given(
    rows=st.integers(1, 8),
    columns=st.integers(1, 8),
    height=st.integers(8, 40),
    width=st.integers(8, 40),
    seed=st.integers(0, 99),
)
def test_upscale_is_bilinear(rows: int, columns: int, height: int, width: int, seed: int) -> None:
    grid = np.random.default_rng(seed).integers(-100, 100, (2, 3, rows, columns)).astype(np.float32)
    expected = torch.nn.functional.interpolate(torch.from_numpy(grid), (height, width), mode="bilinear")
    # Weights are off by up to 1/128 per axis; neighbours differ by up to 200.
    np.testing.assert_allclose(upscale(grid, height, width), expected.numpy(), atol=2 * 200 / 128 + 1e-3)


def test_whole_factors_are_exact() -> None:
    grid = np.random.default_rng(0).integers(0, 17, (5, 1, 8, 8)).astype(np.float32)
    expected = torch.nn.functional.interpolate(torch.from_numpy(grid).double(), (32, 32), mode="bilinear")
    assert (upscale(grid, 32, 32) == expected.numpy()).all()


def test_sums_are_exact_in_any_order() -> None:
    """In float64 nothing is rounded; float32 must give the same values."""
    grid = np.random.default_rng(0).integers(-1023, 1024, (50, 3, 4, 4)).astype(np.float32)
    assert (upscale(grid, 29, 31) == upscale(grid.astype(np.float64), 29, 31)).all()
