"""Tests of the random number generators of a rank: all three are seeded, kept and restored together."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
import torch

from paceline.records.checkpoint import RandomStateInfo
from paceline.records.decoder import decode
from paceline.workloads.random_state import (
    kept_random_state,
    random_state_info,
    restore_random_state,
    seed_everything,
    seeded,
)


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_a_seed_sets_all_generators() -> None:
    seed_everything(2**41 + 3)
    first = draw()
    seed_everything(2**41 + 3)
    assert draw() == first
    seed_everything(2**41 + 4)
    assert not set(draw()) & set(first)


def test_the_state_is_kept_around_a_block_even_if_it_fails() -> None:
    seed_everything(1)
    expected = draw()
    for block in (kept_random_state(), seeded(5)):
        seed_everything(1)
        try:
            with block:
                inside = draw()
                raise KeyError
        except KeyError:
            assert draw() == expected
    assert inside != expected
    with seeded(5):
        assert draw() == inside


def draw_all() -> list[float]:
    """Draw from all generators, also numbers that they make in pairs."""
    return [*draw(), random.gauss(0, 1), float(np.random.normal()), float(torch.randn(()))]


@pytest.mark.parametrize("pairs", [0, 1, 2])
def test_generators_continue_from_a_checkpoint(pairs: int) -> None:
    seed_everything(5)
    for _ in range(pairs):
        draw_all()
    kept = decode(msgspec.json.encode(random_state_info()), RandomStateInfo, "random")
    expected = [draw_all() for _ in range(3)]
    seed_everything(6)
    draw_all()
    restore_random_state(kept)
    assert [draw_all() for _ in range(3)] == expected


@pytest.mark.parametrize(
    ("part", "value"), [("python", b"1234"), ("numpy_key", b"1234"), ("numpy_position", 625), ("torch_cpu", b"1234")]
)
def test_a_state_of_another_generator_is_refused(part: str, value: object) -> None:
    with kept_random_state(), pytest.raises(ValueError, match="the states of random number generators do not fit"):
        restore_random_state(msgspec.structs.replace(random_state_info(), **{part: value}))


@pytest.mark.gpu
def test_the_generator_of_a_gpu_continues() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    kept = random_state_info(device)
    expected = torch.rand(3, device=device).tolist()
    restore_random_state(kept, device)
    assert torch.rand(3, device=device).tolist() == expected
