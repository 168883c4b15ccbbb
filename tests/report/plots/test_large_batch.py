"""Tests of the plots of an experiment with large batches: results, learning rates and noise scales."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from large_batches_on_disk import EPOCHS, read_large_batches, write_large_batches
from paceline.analysis.large_batch.results import LargeBatches
from paceline.report.page.large_batch import render_large_batches
from paceline.report.plots.large_batch import large_batch_figure
from paceline.report.plots.losses import losses
from paceline.report.plots.noise_scale import noise_scales
from report.page.test_comparison import Reader


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> LargeBatches:
    return read_large_batches(
        write_large_batches(tmp_path_factory.mktemp("large") / "e", spread=0.1, rates={"320 linear": 10.0})
    )


@pytest.mark.parametrize("layout", ["layout", "narrow"])
def test_the_panels_of_accuracies_and_losses_do_not_overlap(found: LargeBatches, layout: str) -> None:
    plot = large_batch_figure(found)
    assert plot is not None
    assert {trace.get("xaxis", "x") for trace in plot["data"]} == {"x", "x2"}
    accuracies, test_losses = (_area(plot[layout], number) for number in ("", "2"))
    assert any(one[1] < other[0] or other[1] < one[0] for one, other in zip(accuracies, test_losses, strict=True))


def test_on_a_narrow_screen_the_losses_are_below_the_accuracies_with_their_own_labels(found: LargeBatches) -> None:
    plot = large_batch_figure(found)
    assert plot is not None
    narrow = plot["narrow"]
    assert narrow["height"] == 2 * plot["layout"]["height"]
    assert narrow["yaxis2"]["ticktext"] == narrow["yaxis"]["ticktext"]
    assert narrow["yaxis2"]["domain"][1] < narrow["yaxis"]["domain"][0]


def test_the_axis_of_learning_rates_is_logarithmic_if_their_peaks_are_far_apart(found: LargeBatches) -> None:
    plot = losses(found.comparison)
    assert plot is not None
    own = plot["layout"]["yaxis2"]
    assert own["type"] == "log"
    low, high = own["range"]
    assert low < math.log10(0.1) < math.log10(10.0) < high
    assert own["tickvals"] == pytest.approx([0.1, 1.0, 10.0])


def test_the_axis_of_learning_rates_is_linear_otherwise(tmp_path: Path) -> None:
    plot = losses(read_large_batches(write_large_batches(tmp_path / "e", rates={"320 linear": 1.0})).comparison)
    assert plot is not None
    assert "type" not in plot["layout"]["yaxis2"]


def test_noise_scales_of_different_batches_are_over_epochs(found: LargeBatches) -> None:
    plot = noise_scales(found.comparison)
    assert plot is not None
    assert plot["title"] == "Gradient noise scale over the epochs of training"
    assert {tuple(trace["x"]) for trace in plot["data"]} == {tuple(range(1, EPOCHS + 1))}
    assert plot["layout"]["xaxis"]["title"]["text"] == "epoch"


def test_every_tooltip_has_a_definition(found: LargeBatches) -> None:
    page = Reader(render_large_batches(found))
    wanted = {value for name, value in page.attributes if name == "aria-describedby"}
    assert wanted
    assert wanted <= {value for name, value in page.attributes if name == "id"}
    assert "Parity error" not in page.text, "no strategies are compared"


def _area(layout: dict[str, Any], number: str) -> list[tuple[float, float]]:
    """Return the ends of a panel across and down, as shares of the plot."""
    return [tuple(layout[f"{axis}axis{number}"].get("domain", (0, 1))) for axis in ("x", "y")]
