"""The extra share of paired figures: its median and an interval that outliers do not move."""

from __future__ import annotations

import random

import pytest
from scipy import stats

from paceline.analysis.statistics import overhead_share


def test_the_median_of_ratios() -> None:
    found = overhead_share([1.1, 2.4, 3.0, 4.4, 5.5, 6.6, 700.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    assert found is not None
    assert found.value == pytest.approx(0.1)
    assert found.repeats == 7
    assert found.low == pytest.approx(0.0)
    assert found.high == pytest.approx(99.0), "seven pairs are just enough for the smallest and the greatest"


def test_too_few_pairs_have_no_interval() -> None:
    assert overhead_share([], []) is None
    for pairs in (1, 5):
        found = overhead_share([2.0] * pairs, [1.0] * pairs)
        assert found is not None
        assert (found.value, found.low, found.high) == (1.0, None, None)


@pytest.mark.parametrize("pairs", [6, 7, 20, 101, 400])
def test_the_interval_is_that_of_order_statistics(pairs: int) -> None:
    draw = random.Random(pairs)
    ratios = [draw.lognormvariate(0.02, 0.1) for _ in range(pairs)]
    found = overhead_share(ratios, [1.0] * pairs)
    assert found is not None
    expected = stats.quantile_test(ratios, q=1, p=0.5).confidence_interval(0.95)
    assert found.low == pytest.approx(expected.low - 1)
    assert found.high == pytest.approx(expected.high - 1)


def test_it_holds_the_truth_as_often_as_it_says() -> None:
    draw, held = random.Random(1), 0
    for _ in range(500):
        ratios = [draw.lognormvariate(0.0, 0.1) * (3 if draw.random() < 0.05 else 1) for _ in range(40)]
        found = overhead_share(ratios, [1.0] * 40)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        held += found.low < 0.0066 < found.high  # The median of that mixture, less one.
    assert 0.92 < held / 500 < 0.99
