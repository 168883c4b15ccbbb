"""Plot of the time split at every point of a scaling experiment, as stacked bars."""

from __future__ import annotations

from paceline.analysis.scaling.curves import Mode, Scaling, ScalingPoint
from paceline.analysis.steps.split import PARTS
from paceline.formatting import TIMES, unit_for
from paceline.report.plots.drawing import Json, base_layout, short_names
from paceline.report.plots.palette import PARTS as COLOURS
from paceline.report.plots.split import (
    BOTTOM,
    GAP,
    LABEL_ROOM,
    NAMES,
    TOP,
    StackedBar,
    bar_layout,
    bar_traces,
)
from paceline.report.scaling_verdict import TITLES, format_ranks

BAR_HEIGHT = 26
NARROW_ROOM = 1.5
"""Axis length ÷ longest bar on a narrow screen, where labels leave little room for the bars."""


def split_figure(scaling: Scaling, mode: Mode) -> Json | None:
    """Return a bar per point, by strategy, fewest ranks first; None where no events were recorded."""
    bars = _bars(scaling, mode)
    if not bars:
        return None
    unit = unit_for([bar.split.step_s for bar in bars], TIMES)
    return {
        "title": f"{TITLES[mode]}: time split of a step",
        "data": bar_traces(bars, unit),
        "layout": split_base_layout() | bar_layout(bars, unit, BAR_HEIGHT, LABEL_ROOM),
        "narrow": split_base_layout() | bar_layout(bars, unit, BAR_HEIGHT, NARROW_ROOM),
        "keys": [{"label": NAMES[part], "colour": COLOURS[part], "hollow": False} for part in PARTS],
    }


def split_base_layout() -> Json:
    """Return a layout for stacked bars."""
    stacked = {"barmode": "stack", "bargap": 0.3, "uniformtext": {"minsize": 10, "mode": "hide"}}
    return base_layout(0, left=0, right=8, top=TOP, bottom=BOTTOM) | stacked


def _bars(scaling: Scaling, mode: Mode) -> list[StackedBar]:
    points = [point for point in scaling.points(mode) if point.row.split is not None and point.row.is_measured]
    names = short_names(list(dict.fromkeys(point.strategy for point in points)), 18)
    bars: list[StackedBar] = []
    place, before = 0.0, None
    for point in points:
        assert point.row.split is not None
        place += GAP if before not in (None, point.strategy) else 0.0
        label = _label(scaling, point, names[point.strategy] if before != point.strategy else "")
        about = f"{point.strategy} on {format_ranks(point, scaling)}"
        bars.append(StackedBar(label, about, place, point.row.split.mean))
        place, before = place + 1, point.strategy
    return bars


def _label(scaling: Scaling, point: ScalingPoint, name: str) -> str:
    """Return the label of a bar: its ranks, after the strategy's name for the first of its bars."""
    ranks = format_ranks(point, scaling)
    return f"{name}  {ranks}" if name else ranks
