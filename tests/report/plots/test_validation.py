"""Tests of the plot of test results while training, and of the learning rate below the losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments_on_disk import CLASSIC, read_comparison, write_experiment
from paceline.analysis.comparison import Comparison
from paceline.records.experiment.design import Candidate
from paceline.report.page.comparison import render
from paceline.report.plots.losses import losses
from paceline.report.plots.validation import validation

STEPS = (4, 8, 12)


def comparison_of(folder: Path, **written: Any) -> Comparison:
    return read_comparison(write_experiment(folder / "e", **written))


def of_panel(plot: dict[str, Any], axis: str, name: str) -> list[dict[str, Any]]:
    """Return the traces of a candidate in a panel."""
    pairs = zip(plot["candidates"], plot["data"], strict=True)
    return [trace for candidate, trace in pairs if candidate == name and trace["yaxis"] == axis]


def test_a_candidate_has_a_line_of_medians_and_one_per_repeat(tmp_path: Path) -> None:
    plot = validation(comparison_of(tmp_path, evaluations=STEPS, repeats=3))
    assert plot is not None
    accuracies, test_losses = (of_panel(plot, axis, "ddp") for axis in ("y", "y2"))
    assert [trace["opacity"] < 1 for trace in accuracies] == [True] * 3 + [False]
    assert accuracies[-1]["x"] == [4, 8, 12]
    assert accuracies[-1]["y"] == pytest.approx([100 / 6, 100 / 3, 50], rel=1e-4)
    ends = sorted(trace["y"][-1] for trace in test_losses[:-1])
    assert test_losses[-1]["y"][-1] == ends[1], "the median of three"
    assert accuracies[-1]["meta"] == "ddp"
    assert accuracies[0]["meta"] == "ddp (repeat 1)"


def test_one_run_has_one_marked_line(tmp_path: Path) -> None:
    plot = validation(comparison_of(tmp_path, candidates=[Candidate("ddp", "ddp")], evaluations=STEPS, repeats=1))
    assert plot is not None
    assert [(trace["mode"], trace["yaxis"]) for trace in plot["data"]] == [
        ("lines+markers", "y"),
        ("lines+markers", "y2"),
    ]


def test_the_horizontal_axis_is_steps_epochs_or_training_time(tmp_path: Path) -> None:
    comparison = comparison_of(tmp_path, evaluations=STEPS, repeats=1, step_s={"ddp": 0.5})
    plot = validation(comparison)
    assert plot is not None
    at = plot["candidates"].index("ddp")
    assert [axis["title"] for axis in plot["axes"]] == ["step", "epoch", "training time, s"]
    by_step, by_epoch, by_time = (axis["x"][at] for axis in plot["axes"])
    assert (by_step, by_epoch) == ([4, 8, 12], [0.8, 1.6, 2.4])
    assert by_time[0] == pytest.approx(2.0, rel=0.05)
    assert by_time == pytest.approx([by_time[0], 2 * by_time[0], 3 * by_time[0]], rel=1e-3)
    assert all(len(axis[key]) == len(plot["data"]) for axis in plot["axes"] for key in ("x", "dashes"))


def test_lines_that_coincide_are_striped(tmp_path: Path) -> None:
    plot = validation(comparison_of(tmp_path, evaluations=STEPS, repeats=2))
    assert plot is not None
    pairs = zip(plot["data"], plot["axes"][0]["dashes"], strict=True)
    dashes = {trace["meta"]: dash for trace, dash in pairs if trace["opacity"] == 1}
    assert "px" in dashes["ddp"]
    assert dashes["ddp"] != dashes["allreduce"]
    assert dashes["none"] == "dot"
    assert all(dash in ("solid", "dash", "dot") for dash in plot["axes"][-1]["dashes"])


def test_without_accuracy_there_is_one_panel(tmp_path: Path) -> None:
    plot = validation(comparison_of(tmp_path, evaluations=STEPS, accuracy=None))
    assert plot is not None
    assert {trace["yaxis"] for trace in plot["data"]} == {"y"}
    assert plot["title"] == "Test loss"


@pytest.mark.parametrize("evaluations", [(), (12,)])
def test_a_run_that_is_tested_at_its_end_has_no_curve(tmp_path: Path, evaluations: tuple[int, ...]) -> None:
    comparison = comparison_of(tmp_path, evaluations=evaluations)
    assert validation(comparison) is None
    assert 'id="validation"' not in render(comparison)


def test_the_page_has_the_curves(tmp_path: Path) -> None:
    page = render(comparison_of(tmp_path, evaluations=STEPS))
    assert 'data-figure="validation"' in page
    assert "Test accuracy while training" in page


def test_the_learning_rate_is_below_the_losses(tmp_path: Path) -> None:
    plot = losses(comparison_of(tmp_path, rate=lambda step: 0.1 / (step + 1)))
    assert plot is not None
    runs = 2 * len(CLASSIC)
    rates = plot["data"][runs:]
    assert len(rates) == runs
    assert all(trace["yaxis"] == "y2" for trace in rates)
    assert rates[0]["y"] == pytest.approx([0.1 / (step + 1) for step in range(12)], rel=1e-4)
    assert all(len(plot[key]) == 2 * runs for key in ("candidates", "repeats"))
    assert all(len(axis[key]) == 2 * runs for axis in plot["axes"] for key in ("x", "dashes"))
    assert plot["axes"][0]["x"][runs] == list(range(12))
    lowest = plot["layout"]["yaxis2"]["domain"][1]
    assert all(scale["domain"][0] > lowest for scale in plot["scales"].values())
    assert plot["layout"]["xaxis"]["anchor"] == "y2"


def test_without_a_recorded_learning_rate_there_is_no_panel(tmp_path: Path) -> None:
    plot = losses(comparison_of(tmp_path))
    assert plot is not None
    assert len(plot["data"]) == 2 * len(CLASSIC)
    assert "yaxis2" not in plot["layout"]
