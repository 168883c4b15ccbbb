"""Tests of the plot of the gradient noise scale."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.analysis.noise_scale import NoiseCurve
from paceline.report.page.comparison import render
from paceline.report.plots import noise_scale
from paceline.report.plots.noise_scale import noise_scales
from report.plots.test_validation import STEPS, comparison_of


def test_runs_without_measurements_have_no_plot(tmp_path: Path) -> None:
    comparison = comparison_of(tmp_path, evaluations=STEPS, repeats=1)
    assert noise_scales(comparison) is None
    assert 'id="noise"' not in render(comparison)


def test_each_run_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_scale, "noise_curve", lambda _: NoiseCurve([10, 20, 30], [100.0, float("nan"), 400.0]))
    comparison = comparison_of(tmp_path, evaluations=STEPS, repeats=2)
    plot = noise_scales(comparison)
    assert plot is not None
    assert len(plot["data"]) == sum(len(comparison.record_set.runs_of(row.candidate.name)) for row in comparison.rows)
    assert plot["data"][0]["x"] == [10, 20, 30]
    assert plot["data"][0]["y"] == [100.0, None, 400.0]
    assert plot["layout"]["yaxis"]["ticktext"] == ["100", "200", "300", "400"]
    assert 'data-figure="noise"' in render(comparison)
