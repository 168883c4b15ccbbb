"""A winner is named if there is one; repeated interim analyses do not produce false winners."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from paceline.analysis.costs import CostTable
from paceline.analysis.decision import ERROR_RATE, decide
from paceline.records.experiment.design import Candidate

A, B, C = Candidate("a", "a"), Candidate("b", "b"), Candidate("c", "c")
NONE = Candidate("none", "none", role="bound", lossless=False)
SINGLE = Candidate("single", "single", role="baseline")


def times(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


def test_a_clear_difference_has_a_winner() -> None:
    decision = decide([A, B], CostTable({"a": times(2.0, 2.1, 2.05), "b": times(1.0, 1.01, 1.02)}), interim_analyses=8)
    assert (decision.outcome, decision.first, decision.second) == ("winner", "b", "a")
    assert decision.ratio is not None
    assert decision.ratio.value == pytest.approx(2.0, rel=0.05)


def test_differences_below_one_per_cent_are_equal() -> None:
    a, b = times(*[1.0 + 1e-4 * i for i in range(10)]), times(*[1.001] * 10)
    assert decide([A, B], CostTable({"a": a, "b": b}), interim_analyses=1).outcome == "equal"


def test_noise_leaves_the_decision_undecided() -> None:
    assert (
        decide([A, B], CostTable({"a": times(1.0, 1.4, 0.9), "b": times(1.2, 0.9, 1.3)}), interim_analyses=8).outcome
        == "undecided"
    )


def test_bounds_and_baselines_cannot_win() -> None:
    costs = {"a": times(2.0, 2.0), "none": times(1.0, 1.0), "single": times(0.5, 0.5)}
    assert decide([A, NONE, SINGLE], CostTable(costs), interim_analyses=1).outcome == "single_candidate"
    assert decide([NONE, SINGLE], CostTable(costs), interim_analyses=1).outcome == "no_candidate"


@pytest.mark.parametrize("repeats", [1, 2])
def test_fewer_than_three_repeats_decide_nothing(repeats: int) -> None:
    a, b = times(*[1.0, 1.1][:repeats]), times(*[9.0, 8.8][:repeats])
    decision = decide([A, B], CostTable({"a": a, "b": b}), interim_analyses=1)
    assert (decision.outcome, decision.first) == ("undecided", "a")
    assert decision.ratio is not None
    assert (decision.ratio.low, decision.ratio.each) == (None, pytest.approx((9.0, 8.0)[:repeats]))


def test_a_candidate_without_times_is_excluded() -> None:
    decision = decide(
        [A, B, C], CostTable({"a": {}, "b": times(1.0, 1.0, 1.01), "c": times(3.0, 3.01, 3.0)}), interim_analyses=1
    )
    assert (decision.first, decision.second) == ("b", "c")


def test_a_failed_candidate_is_excluded_however_fast_it_was() -> None:
    costs = {"a": times(0.1, 0.1, 0.1), "b": times(1.0, 1.0, 1.01), "c": times(3.0, 3.01, 3.0)}
    decision = decide([A, B, C], CostTable(costs), interim_analyses=1, failed={"a"})
    assert (decision.outcome, decision.first, decision.second) == ("winner", "b", "c")
    assert decide([A], CostTable(costs), interim_analyses=1, failed={"a"}).outcome == "no_candidate"


def test_the_repeats_of_the_ratio_are_those_that_both_have() -> None:
    decision = decide(
        [A, B], CostTable({"a": times(1.0, 1.0, 1.0, 1.0), "b": {1: 2.0, 3: 2.1, 9: 2.0}}), interim_analyses=1
    )
    assert decision.ratio is not None
    assert decision.ratio.repeats == 2
    apart = decide([A, B], CostTable({"a": times(1.0, 1.0), "b": {8: 2.0, 9: 2.0}}), interim_analyses=1)
    assert apart.outcome == "undecided"
    assert apart.ratio is not None
    assert (apart.ratio.value, apart.ratio.repeats, apart.ratio.low) == (2.0, 0, None)


def even(draw: random.Random) -> float:
    """Return the noise of an idle machine."""
    return math.exp(draw.gauss(0, 0.05))


def disturbed(draw: random.Random) -> float:
    """Return noise with occasional disturbances by other programs."""
    return even(draw) * (1 + draw.expovariate(2) if draw.random() < 0.1 else 1)


@pytest.mark.parametrize("noise", [even, disturbed])
@pytest.mark.parametrize(("least", "most"), [(3, 10), (2, 3)])
def test_repeated_analyses_of_equals_rarely_name_a_winner(
    noise: Callable[[random.Random], float], least: int, most: int
) -> None:
    draw = random.Random(1)
    trials, wrong = 400, 0
    for _ in range(trials):
        a = [noise(draw) for _ in range(most)]
        b = [noise(draw) for _ in range(most)]
        decisions = (
            decide([A, B], CostTable({"a": times(*a[:n]), "b": times(*b[:n])}), interim_analyses=most - least + 1)
            for n in range(least, most + 1)
        )
        wrong += any(decision.outcome == "winner" for decision in decisions)
    assert wrong / trials < ERROR_RATE
