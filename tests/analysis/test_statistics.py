"""Estimates over repeats, compared with scipy and with simulations."""

from __future__ import annotations

import math
import random
import statistics
import subprocess
import sys

import pytest
from scipy import stats

from paceline.analysis.statistics import (
    Estimate,
    estimate_levels,
    estimate_losses,
    estimate_shares,
    estimate_times,
    median_time,
    overhead_share,
    paired_difference,
    paired_ratio,
)


def test_the_interval_is_students_on_logarithms() -> None:
    values = [1.0, 1.2, 1.1, 1.4]
    estimate = estimate_times(values)
    logs = [math.log(value) for value in values]
    low, high = stats.t.interval(0.95, 3, statistics.fmean(logs), stats.sem(logs))
    assert estimate == Estimate(
        pytest.approx(math.sqrt(1.1 * 1.2)), pytest.approx(math.exp(low)), pytest.approx(math.exp(high)), 4
    )


def test_the_median_rate_is_one_over_the_median_time() -> None:
    for times in ([0.1, 4.0], [0.3, 0.1, 0.2], [0.1, 0.9, 0.2, 7.0]):
        rate = estimate_times([1 / time for time in times])
        assert rate is not None
        assert rate.value == pytest.approx(1 / median_time(times))
    assert median_time([0.3, 0.1, 0.2]) == 0.2, "an odd number has a middle value"


def test_fewer_than_three_repeats_have_no_interval_but_the_value_of_each() -> None:
    assert estimate_times([]) is None
    assert estimate_times([2.0]) == Estimate(2.0, None, None, 1, (2.0,))
    assert estimate_times([0.5, 2.0]) == Estimate(1.0, None, None, 2, (0.5, 2.0))
    assert estimate_levels([-1.0]) == Estimate(-1.0, None, None, 1, (-1.0,))
    assert estimate_shares([0.1, 0.3]) == Estimate(pytest.approx(0.2), None, None, 2, (0.1, 0.3))
    three = estimate_times([1.0, 2.0, 3.0])
    assert three is not None
    assert three.each == ()


def test_two_repeats_may_contradict_each_other() -> None:
    assert Estimate(1.0, None, None, 2, (0.9, 1.1)).repeats_contradict(1)
    assert not Estimate(0.3, None, None, 2, (0.32, 0.31)).repeats_contradict(1)
    assert not Estimate(1.0, 0.9, 1.1, 3).repeats_contradict(1), "an interval has its own test"


def test_intervals_cover_the_true_value_at_their_level() -> None:
    draw = random.Random(0)
    trials = 2000
    held = 0
    for _ in range(trials):
        estimate = estimate_times([math.exp(draw.gauss(0.0, 0.2)) for _ in range(4)])
        assert estimate is not None
        held += estimate.spans(1.0)
    assert held / trials == pytest.approx(0.95, abs=0.015)


def test_shares_stay_between_zero_and_one() -> None:
    for values in ([0.05, 0.4, 0.2], [0.95, 0.6, 0.8]):
        estimate = estimate_shares(values)
        assert estimate is not None
        assert 0.0 in (estimate.low, 1 - (estimate.high or 0))


def test_the_interval_of_losses_has_no_negative_values_unless_a_loss_is_negative() -> None:
    wide = estimate_losses([0.1, 0.2, 3.0])
    negative = estimate_losses([-0.1, 0.2, 3.0])
    assert wide is not None
    assert negative is not None
    assert wide.low == 0.0
    assert wide.high == estimate_levels([0.1, 0.2, 3.0]).high  # type: ignore[union-attr]
    assert negative.low is not None
    assert negative.low < -1
    assert estimate_losses([]) is None


def test_pairing_removes_the_noise_of_a_repeat() -> None:
    noise = [1.0, 3.0, 0.5, 2.0]
    one, other = {i: 2.0 * n for i, n in enumerate(noise)}, dict(enumerate(noise))
    assert paired_ratio(one, other) == Estimate(2.0, pytest.approx(2.0), pytest.approx(2.0), 4)
    unpaired = estimate_times(list(one.values()))
    assert unpaired is not None
    assert unpaired.spans(1.0)


def test_unpaired_values_have_no_interval() -> None:
    assert paired_ratio({"a": 3.0}, {"b": 2.0}) == Estimate(1.5, None, None, 0)
    assert paired_ratio({}, {"b": 2.0}) is None
    assert paired_difference({"a": 3.0}, {"b": 2.0}) is None


def test_the_inverse_ratio_has_the_inverse_interval() -> None:
    one, other = {0: 1.0, 1: 1.3, 2: 1.1}, {0: 2.0, 1: 2.2, 2: 2.5}
    there, back = paired_ratio(one, other), paired_ratio(other, one)
    assert there is not None
    assert back is not None
    assert there.low is not None
    assert back.high == pytest.approx(1 / there.low)


def test_with_outliers_the_interval_still_contains_the_value() -> None:
    values = [1.0] * 30 + [1000.0]
    estimate = estimate_times(values)
    assert estimate is not None
    assert estimate.spans(estimate.value)


def test_more_repeats_do_not_reduce_a_shared_error() -> None:
    for repeats in (3, 300):
        same = paired_difference(dict.fromkeys(range(repeats), 0.7), dict.fromkeys(range(repeats), 0.6), 0.95)
        assert same is not None
        assert same.low == pytest.approx(0.1)
        shared = paired_difference(
            dict.fromkeys(range(repeats), 0.7), dict.fromkeys(range(repeats), 0.6), 0.95, shared_variance=0.04
        )
        assert shared is not None
        assert shared.high == pytest.approx(0.1 + 1.97 * 0.2, rel=0.01)


def test_intervals_with_a_shared_error_cover_the_true_value_at_their_level() -> None:
    draw = random.Random(3)
    trials = 2000
    held = 0
    for _ in range(trials):
        shared = draw.gauss(0.0, 0.1)
        values = {repeat: draw.gauss(0.0, 0.2) + shared for repeat in range(4)}
        estimate = paired_difference(values, dict.fromkeys(values, 0.0), shared_variance=0.1**2)
        assert estimate is not None
        held += estimate.spans(0.0)
    assert held / trials == pytest.approx(0.955, abs=0.015)


def test_estimates_can_be_scaled_and_inverted() -> None:
    estimate = Estimate(2.0, 1.0, 4.0, 3)
    assert estimate.scaled(0.5) == Estimate(1.0, 0.5, 2.0, 3)
    assert estimate.inverse() == Estimate(0.5, 0.25, 1.0, 3)
    assert Estimate(2.0, None, None, 1, (2.0,)).inverse().scaled(4) == Estimate(2.0, None, None, 1, (2.0,))
    assert Estimate(0.75, 0.5, 1.25, 3).complement() == Estimate(0.25, -0.25, 0.5, 3)
    assert Estimate(0.75, None, None, 2, (0.5, 1.0)).complement() == Estimate(0.25, None, None, 2, (0.5, 0.0))
    assert Estimate(2.0, 0.0, 4.0, 2).inverse() == Estimate(0.5, 0.25, math.inf, 2)


def test_an_interval_of_more_than_a_factor_of_ten_is_vague() -> None:
    assert Estimate(1.0, 0.1, 1.0, 2).is_vague
    assert Estimate(1.0, 0.0, 25129.43, 2).is_vague
    assert not Estimate(1.0, 0.62, 2.91, 2).is_vague
    assert not Estimate(1.0, None, None, 1).is_vague


def test_overhead_is_the_median_of_ratios() -> None:
    found = overhead_share([1.1, 2.4, 3.0, 4.4, 5.5, 6.6, 700.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    assert found is not None
    assert found.value == pytest.approx(0.1)
    assert found.repeats == 7
    assert found.low == pytest.approx(0.0)
    assert found.high == pytest.approx(99.0), (
        "seven pairs are just enough: the interval ends at the minimum and the maximum"
    )


def test_overhead_of_too_few_pairs_has_no_interval() -> None:
    assert overhead_share([], []) is None
    for pairs in (1, 5):
        found = overhead_share([2.0] * pairs, [1.0] * pairs)
        assert found is not None
        assert (found.value, found.low, found.high) == (1.0, None, None)


@pytest.mark.parametrize("pairs", [6, 7, 20, 101, 400])
def test_the_interval_of_an_overhead_comes_from_order_statistics(pairs: int) -> None:
    draw = random.Random(pairs)
    ratios = [draw.lognormvariate(0.02, 0.1) for _ in range(pairs)]
    found = overhead_share(ratios, [1.0] * pairs)
    assert found is not None
    expected = stats.quantile_test(ratios, q=1, p=0.5).confidence_interval(0.95)
    assert found.low == pytest.approx(expected.low - 1)
    assert found.high == pytest.approx(expected.high - 1)


def test_the_interval_of_an_overhead_covers_the_true_value_at_its_level() -> None:
    draw, held = random.Random(1), 0
    for _ in range(500):
        ratios = [draw.lognormvariate(0.0, 0.1) * (3 if draw.random() < 0.05 else 1) for _ in range(40)]
        found = overhead_share(ratios, [1.0] * 40)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        held += found.low < 0.0066 < found.high  # The median of that mixture, minus 1.
    assert 0.92 < held / 500 < 0.99


def test_scipy_stats_is_not_imported() -> None:
    code = """
import sys
from paceline.analysis.statistics import estimate_times, overhead_share
assert "scipy" not in sys.modules
estimate_times([1.0, 2.0, 3.0]), overhead_share([1.0] * 9, [1.0] * 9)
print("scipy.special" in sys.modules, "scipy.stats" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n", "scipy.stats takes several times as long to import as scipy.special"
