"""Tests of the gradient noise scale of a run, from the figures of its windows."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.analysis.noise_scale import noise_curve, noise_scale
from paceline.records.events import LogEvent, NoiseFigures


def run_of(windows: list[tuple[float, float] | None]) -> Any:
    """Return a run with a window of 10 steps, 2 of them measured, for each pair (tr Σ, |G|²)."""
    logs = [
        LogEvent(
            epoch=0,
            step=10 * number,
            wall_s=1.0,
            losses=[1.0] * 10,
            samples=10,
            correct=None,
            noise=None if own is None else NoiseFigures(steps=2, trace=own[0], gradient_sq=own[1], cost_s=0.0),
        )
        for number, own in enumerate(windows, start=1)
    ]
    return SimpleNamespace(events_of=lambda kind: logs if kind is LogEvent else [])


def test_parts_are_averaged_before_the_ratio_over_the_last_half() -> None:
    found = noise_scale(run_of([(1000.0, 1.0)] * 2 + [(10.0, 3.0), (30.0, -1.0)]))
    assert found is not None
    assert found.value == pytest.approx(20.0)  # (10 + 30) ÷ (3 − 1)
    assert found.steps == 4
    assert (found.low, found.high) == (None, None)


def test_equal_windows_have_an_interval_of_no_width() -> None:
    found = noise_scale(run_of([(50.0, 2.0)] * 20))
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((25.0, 25.0, 25.0))


def test_the_interval_is_open_if_the_gradient_may_be_zero() -> None:
    found = noise_scale(run_of([(50.0, 3.0), (50.0, -2.0)] * 10))
    assert found is not None
    assert found.low is not None
    assert found.low < found.value
    assert found.high == math.inf


@pytest.mark.parametrize("windows", [[], [None, None], [(50.0, -1.0)] * 8])
def test_no_value_without_measurements_or_a_positive_gradient(windows: list[tuple[float, float] | None]) -> None:
    assert noise_scale(run_of(windows)) is None


def test_the_curve_is_unbiased_from_the_first_window_and_follows_a_change() -> None:
    curve = noise_curve(run_of([(50.0, 2.0)] * 50 + [None] + [(400.0, 2.0)] * 50))
    assert curve.steps[0] == 10
    assert curve.values[0] == pytest.approx(25.0)
    assert curve.values[49] == pytest.approx(25.0)
    assert curve.steps[50] == 520
    assert curve.values[-1] == pytest.approx(200.0, rel=0.02)
