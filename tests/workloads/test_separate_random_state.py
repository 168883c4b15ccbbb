"""A second random state goes on by itself, and leaves the generators as they were."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import mtrand

from paceline.workloads.random_state import kept_random_state, seed_everything
from paceline.workloads.separate_random_state import SeparateRandomState

DRAWS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "python": random.random,
    "python pair": lambda: random.gauss(0, 1),
    "numpy": lambda: float(np.random.random()),
    "numpy pair": lambda: float(np.random.normal()),
    "torch": lambda: float(torch.rand(())),
    "torch pair": lambda: float(torch.randn(())),
}
BLOCKS = 5


def one_by_one(seed: int, draw: Callable[[], Any]) -> list[Any]:
    """Return what draws give without anything between them."""
    with kept_random_state():
        seed_everything(seed)
        return [draw() for _ in range(BLOCKS)]


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    with kept_random_state():
        yield


@pytest.mark.parametrize("outside", DRAWS.values(), ids=DRAWS.keys())
@pytest.mark.parametrize("inside", DRAWS.values(), ids=DRAWS.keys())
def test_both_states_go_on_as_if_the_other_were_not_there(
    inside: Callable[[], Any], outside: Callable[[], Any]
) -> None:
    separate, found = SeparateRandomState(2**33 + 5), []
    seed_everything(3)
    for _ in range(BLOCKS):
        with separate.in_use():
            within = inside()
        found.append((within, outside()))
    assert [within for within, _ in found] == one_by_one(2**33 + 5, inside)
    assert [own for _, own in found] == one_by_one(3, outside)


def test_two_states_do_not_disturb_each_other() -> None:
    draw = DRAWS["numpy pair"]
    states, found = [SeparateRandomState(seed) for seed in (1, 2)], list[list[float]]([[], []])
    for _ in range(BLOCKS):
        for state, own in zip(states, found, strict=True):
            with state.in_use():
                own.append(draw())
    assert found == [one_by_one(seed, draw) for seed in (1, 2)]


def test_the_state_is_kept_if_the_block_fails() -> None:
    separate = SeparateRandomState(1)
    seed_everything(4)
    try:
        with separate.in_use():
            assert np.random.random() == one_by_one(1, DRAWS["numpy"])[0]
            raise KeyError
    except KeyError:
        pass
    assert np.random.random() == one_by_one(4, DRAWS["numpy"])[0]
    with separate.in_use():
        assert np.random.random() == one_by_one(1, DRAWS["numpy"])[1]


def test_seeds_and_other_bit_generators_of_the_user_are_kept() -> None:
    before, own = mtrand.get_bit_generator(), np.random.PCG64(7)
    expected = np.random.RandomState(np.random.PCG64(7)).random_sample(4).tolist()
    separate = SeparateRandomState(1)
    mtrand.set_bit_generator(own)
    found = []
    for _ in range(4):
        with separate.in_use():
            np.random.seed(9)
        found.append(np.random.random())
    mtrand.set_bit_generator(before)
    assert found == expected
    with separate.in_use():
        assert np.random.random() == one_by_one(9, DRAWS["numpy"])[0]


def test_numpy_s_state_is_not_read_where_nothing_draws_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_everything(0)  # A normal number that an earlier test has left would have to be read.
    separate = SeparateRandomState(1)
    with separate.in_use():
        pass
    monkeypatch.setattr(np.random, "get_state", None)
    monkeypatch.setattr(np.random, "set_state", None)
    for name in ("nothing", "python", "torch"):
        with separate.in_use():
            DRAWS[name]()
        DRAWS[name]()
