"""Tests of the axis of losses."""

from __future__ import annotations

import math

import pytest

from paceline.report.plots.drawing import loss_axis


@pytest.mark.parametrize("losses", [[2.3, 1.2, 0.6], [2.3, math.nan, 40.0], [0.0, 1.0, 1e6], [math.nan], []])
def test_usual_losses_have_a_linear_axis(losses: list[float]) -> None:
    own = loss_axis("test loss", losses, 5, rangemode="tozero")
    assert "type" not in own
    assert (own["nticks"], own["rangemode"]) == (5, "tozero")


def test_losses_that_flatten_all_others_have_a_logarithmic_axis() -> None:
    own = loss_axis("test loss", [0.6, 2.3, 1.2, 75_929.6, math.inf], 5, domain=[0, 0.4], rangemode="tozero")
    assert own["type"] == "log"
    assert own["rangemode"] == "normal", "there is no zero on it"
    assert own["domain"] == [0, 0.4]
    assert own["tickvals"] == [1.0, 10.0, 100.0, 1000.0, 10_000.0]
    assert own["ticktext"][0] == "1"
