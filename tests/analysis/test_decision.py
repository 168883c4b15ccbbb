"""A winner is named when there is one, and not by looking often enough."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from paceline.analysis.decision import ERROR_RATE, decide
from paceline.records.experiment import Candidate

A, B, C = Candidate("a", "a"), Candidate("b", "b"), Candidate("c", "c")
NONE = Candidate("none", "none", role="bound", lossless=False)
SINGLE = Candidate("single", "single", role="baseline")


def times(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


def test_a_clear_difference_has_a_winner() -> None:
    decision = decide([A, B], {"a": times(2.0, 2.1, 2.05), "b": times(1.0, 1.01, 1.02)}, looks=8)
    assert (decision.outcome, decision.first, decision.second) == ("winner", "b", "a")
    assert decision.ratio is not None
    assert decision.ratio.value == pytest.approx(2.0, rel=0.05)


def test_what_is_within_one_per_cent_is_the_same() -> None:
    a, b = times(*[1.0 + 1e-4 * i for i in range(10)]), times(*[1.001] * 10)
    assert decide([A, B], {"a": a, "b": b}, looks=1).outcome == "same"


def test_noise_leaves_it_open() -> None:
    assert decide([A, B], {"a": times(1.0, 1.4, 0.9), "b": times(1.2, 0.9, 1.3)}, looks=8).outcome == "open"


def test_bounds_and_baselines_cannot_win() -> None:
    costs = {"a": times(2.0, 2.0), "none": times(1.0, 1.0), "single": times(0.5, 0.5)}
    assert decide([A, NONE, SINGLE], costs, looks=1).outcome == "alone"
    assert decide([NONE, SINGLE], costs, looks=1).outcome == "nothing"


def test_one_repeat_decides_nothing() -> None:
    assert decide([A, B], {"a": times(1.0), "b": times(9.0)}, looks=1).outcome == "open"


def test_a_candidate_without_figures_is_left_out() -> None:
    decision = decide([A, B, C], {"a": {}, "b": times(1.0, 1.0), "c": times(3.0, 3.01)}, looks=1)
    assert (decision.first, decision.second) == ("b", "c")


def test_a_candidate_that_failed_is_left_out_however_fast_it_was() -> None:
    costs = {"a": times(0.1, 0.1), "b": times(1.0, 1.0), "c": times(3.0, 3.01)}
    decision = decide([A, B, C], costs, looks=1, failed={"a"})
    assert (decision.outcome, decision.first, decision.second) == ("winner", "b", "c")
    assert decide([A], costs, looks=1, failed={"a"}).outcome == "nothing"


def test_the_repeats_of_the_ratio_are_those_that_both_have() -> None:
    decision = decide([A, B], {"a": times(1.0, 1.0, 1.0, 1.0), "b": {1: 2.0, 3: 2.1, 9: 2.0}}, looks=1)
    assert decision.ratio is not None
    assert decision.ratio.repeats == 2
    apart = decide([A, B], {"a": times(1.0, 1.0), "b": {8: 2.0, 9: 2.0}}, looks=1)
    assert apart.outcome == "open"
    assert apart.ratio is not None
    assert (apart.ratio.value, apart.ratio.repeats, apart.ratio.low) == (2.0, 0, None)


def even(draw: random.Random) -> float:
    """Noise of a quiet machine."""
    return math.exp(draw.gauss(0, 0.05))


def disturbed(draw: random.Random) -> float:
    """Now and then other programs take the cores."""
    return even(draw) * (1 + draw.expovariate(2) if draw.random() < 0.1 else 1)


@pytest.mark.parametrize("noise", [even, disturbed])
@pytest.mark.parametrize(("least", "most"), [(3, 10), (2, 3)])
def test_looking_again_and_again_at_equals_rarely_names_a_winner(
    noise: Callable[[random.Random], float], least: int, most: int
) -> None:
    draw = random.Random(1)
    trials, wrong = 400, 0
    for _ in range(trials):
        a = [noise(draw) for _ in range(most)]
        b = [noise(draw) for _ in range(most)]
        looks = (
            decide([A, B], {"a": times(*a[:n]), "b": times(*b[:n])}, looks=most - least + 1)
            for n in range(least, most + 1)
        )
        wrong += any(decision.outcome == "winner" for decision in looks)
    assert wrong / trials < ERROR_RATE
