"""Tests of the hash against splitmix64 in Python's integers, and of its randomness."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.workloads.data.sample_random import draw_below, mix

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def test_mix_is_splitmix64() -> None:
    """Return the first outputs of the reference (https://prng.di.unimi.it/splitmix64.c) for the seed 1234567."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [mix(1234567 + n * GOLDEN) for n in range(1, 6)] == expected


@given(
    index=st.integers(0, 2**62),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**40),
    below=st.integers(1, 10_000),
)
def test_tensors_wrap_around_as_integers_do(index: int, seed: int, epoch: int, below: int) -> None:
    key = mix(mix(seed + GOLDEN) + epoch + GOLDEN)
    expected = (mix(index * GOLDEN + key) >> 33) * below >> 31
    assert draw_below(below, torch.tensor([index]), seed=seed, epoch=epoch).item() == expected


def test_indices_are_left_alone() -> None:
    indices = torch.arange(10)
    draw_below(5, indices, seed=1, epoch=1)
    assert torch.equal(indices, torch.arange(10))


@pytest.mark.parametrize("vary", ["index", "seed", "epoch"])
def test_draws_are_uniform_along_every_key(vary: str) -> None:
    """A chi-squared statistic with 161 degrees of freedom has mean 161 and standard deviation 18."""
    count, below = 16_200, 162
    if vary == "index":
        draws = draw_below(below, torch.arange(count), seed=0, epoch=0)
    else:
        fixed = {"seed": 0, "epoch": 0}
        draws = torch.cat([draw_below(below, torch.tensor([7]), **(fixed | {vary: n})) for n in range(count)])
    observed = torch.bincount(draws, minlength=below).double()
    assert len(observed) == below
    chi_squared = ((observed - count / below) ** 2 / (count / below)).sum().item()
    assert 90 < chi_squared < 250


def test_neighbours_are_independent() -> None:
    """A draw is independent of that of the next sample, epoch and seed."""
    indices = torch.arange(20_000)
    here = draw_below(1 << 20, indices, seed=3, epoch=5).double()
    for other in (
        draw_below(1 << 20, indices + 1, seed=3, epoch=5),
        draw_below(1 << 20, indices, seed=3, epoch=6),
        draw_below(1 << 20, indices, seed=4, epoch=5),
        draw_below(1 << 20, indices, seed=5, epoch=3),
    ):
        correlation = torch.corrcoef(torch.stack([here, other.double()]))[0, 1].item()
        assert abs(correlation) < 0.035
