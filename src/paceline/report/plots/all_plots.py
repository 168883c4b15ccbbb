"""The figures of the page by name: pure functions from a comparison to plotly's data and layout."""

from __future__ import annotations

from paceline.analysis.comparison import Comparison
from paceline.report.plots.bars import bars
from paceline.report.plots.drawing import Json
from paceline.report.plots.link import link
from paceline.report.plots.loss_differences import loss_differences
from paceline.report.plots.losses import losses
from paceline.report.plots.resources import resources
from paceline.report.plots.split import split
from paceline.report.plots.step_times import step_time_plot
from paceline.report.plots.timeline import timeline

PLOTS = {
    "split": split,
    "timeline": timeline,
    "link": link,
    "resources": resources,
    "bars": bars,
    "losses": losses,
    "times": step_time_plot,
    "loss_differences": loss_differences,
}
"""In the order of the page."""


def all_plots(comparison: Comparison) -> dict[str, Json]:
    """Every figure that there is something to draw for."""
    drawn = {name: draw(comparison) for name, draw in PLOTS.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}
