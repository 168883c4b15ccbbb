"""Tests of the random number generators of a rank: all three are seeded, kept and restored together."""

from __future__ import annotations

import random

import numpy as np
import torch

from paceline.workloads.random_state import kept_random_state, seed_everything, seeded


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
