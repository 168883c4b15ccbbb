"""Panels of lines with intervals: a line per curve, labelled at its end, over a horizontal axis of a few values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.statistics import Estimate
from paceline.formatting import Unit, tick_label
from paceline.report.figures.columns import interval_or_repeats
from paceline.report.figures.points import wide_interval
from paceline.report.plots.drawing import (
    LABEL_SIZE,
    LINE,
    Json,
    Panel,
    axis,
    grid,
    heading,
    numbered,
    plain,
    rounded,
    ticks,
)
from paceline.report.plots.end_labels import AxisScale, end_label, spread_labels

HEIGHT, GAP_HEIGHT, TOP, BOTTOM, LEFT = 250, 74, 34, 48, 52
"""Pixels: height of a panel, gap between rows of panels, and margins."""
WIDE = 960
"""Width that panels in a row are laid out for, in pixels."""
MANY_TIMES = 6.0
"""Ratio of the largest to the smallest value from which a vertical axis is logarithmic."""
SHIFT, FURTHEST_SHIFT = 0.03, 0.045
"""Shares of the axis: shift between the points of two lines at the same place, and the largest shift."""


@dataclass(frozen=True)
class PanelLine:
    """Curve with its values and style."""

    label: str
    colour: str
    dash: str
    places: list[float]
    """Positions on the horizontal axis."""
    values: list[Estimate]
    unit: Unit
    names: list[str]
    """First line of the tooltip of each point."""
    remarks: list[str]
    """Reason for which a point is hollow, as the last line of its tooltip; empty for a filled point."""
    is_level: bool = False
    """Whether it is one value, drawn as a dotted line over the whole panel."""
    shift: float = 0.0
    """Horizontal shift of its points, as a share of the axis, so that intervals of several lines do not coincide."""

    def xs(self, across: AxisScale) -> list[float]:
        """Return the horizontal positions of its points."""
        low, high = across.ends
        return [across.value(across.place(place) + self.shift * (high - low)) for place in self.places]

    @property
    def ys(self) -> list[float]:
        """Values in the unit of the panel."""
        return [value.value / self.unit.scale for value in self.values]


def line_shifts(moved: Sequence[bool]) -> list[float]:
    """Return a small horizontal shift for each line that is to be moved."""
    numbers = [number for number, own in enumerate(moved) if own]
    gap = min(SHIFT, 2 * FURTHEST_SHIFT / max(1, len(numbers) - 1))
    places = {number: gap * (place - (len(numbers) - 1) / 2) for place, number in enumerate(numbers)}
    return [places.get(number, 0.0) for number in range(len(moved))]


def on_panel(number: int, traces: Sequence[Json]) -> list[Json]:
    """Return the traces with the horizontal axis of their panel; the view sets the vertical one."""
    return [trace | {"xaxis": numbered("x", number)} for trace in traces]


def value_scale(lines: Sequence[PanelLine]) -> AxisScale:
    """Return a vertical axis for positive values: from zero, or logarithmic if they differ by a large factor."""
    values = [value for line in lines for value in line.ys]
    tops = [upper_end(line, place) for line in lines for place in range(len(line.ys))]
    if min(values) > 0 and max(values) / min(values) >= MANY_TIMES:
        return AxisScale(min(values) / 1.25, max([*values, *tops]) * 1.15, logarithmic=True)
    return AxisScale(0.0, 1.08 * max([*values, *tops]), logarithmic=False)


def upper_end(line: PanelLine, place: int) -> float:
    """Return the upper end of an interval, limited so that a wide one does not flatten everything else."""
    high = line.values[place].high
    value = line.ys[place]
    return value if high is None else min(high / line.unit.scale, 1.3 * value)


def label_place(across: AxisScale) -> float:
    """Return the horizontal position at which labels begin."""
    low, high = across.ends
    return across.value(high - 0.03 * (high - low))


def panel_traces(
    lines: Sequence[PanelLine], scale: AxisScale, across: AxisScale, marks: Sequence[float], taken: Sequence[float] = ()
) -> list[Json]:
    """Return the lines with their intervals, then their labels, which keep clear of heights that are `taken`.

    `marks` are the values that the horizontal axis names.
    """
    drawn = [_line_trace(line, marks, scale, across) for line in lines]
    places = spread_labels(
        [scale.place(line.ys[-1]) for line in lines], scale, [scale.place(own) for own in taken], height=HEIGHT
    )
    labels = [_label(line, scale.value(place), across, marks) for line, place in zip(lines, places, strict=True)]
    return [*drawn, *labels]


def _line_trace(line: PanelLine, marks: Sequence[float], scale: AxisScale, across: AxisScale) -> Json:
    """Return the trace of a line; one value becomes a dotted horizontal line over the whole panel."""
    level = line.is_level and len(line.places) == 1 and len(marks) > 1
    values = line.values * (2 if level else 1)
    reach = [end * line.unit.scale for end in (scale.low, scale.high)]  # Intervals are cut off at the panel's edge.
    highs = [None if v.high is None else (min(v.high, reach[1]) - v.value) / line.unit.scale for v in values]
    lows = [None if v.low is None else (v.value - max(v.low, reach[0])) / line.unit.scale for v in values]
    return {
        "type": "scatter",
        "mode": "lines" if level else "lines+markers",
        "x": [marks[0], marks[-1]] if level else rounded(line.xs(across)),
        "y": rounded(line.ys * (2 if level else 1)),
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": highs,
            "arrayminus": lows,
            "color": line.colour,
            "thickness": 1,
            "width": 3,
            "visible": not level,
        },
        "line": {"color": line.colour, "width": LINE, "dash": "dot" if level else line.dash},
        "marker": {
            "color": line.colour,
            "size": 7,
            "symbol": ["circle-open" if remark else "circle" for remark in line.remarks],
        },
        "cliponaxis": False,
        "customdata": [_tooltip(line, place) for place in range(len(line.places))] * (2 if level else 1),
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _tooltip(line: PanelLine, place: int) -> str:
    value, unit = line.values[place], line.unit
    ends = wide_interval(value) or interval_or_repeats(value, unit)
    range_line = f"<br>{'both repeats' if value.each else '95% interval'}: {ends}" if ends else ""
    remark = f"<br>{plain(line.remarks[place])}" if line.remarks[place] else ""
    return f"{plain(line.names[place])}<br>{unit.text(value.value)}{range_line}{remark}"


def _label(line: PanelLine, height: float, across: AxisScale, marks: Sequence[float]) -> Json:
    """Return a curve's label, with a thin line to its end."""
    end = marks[-1] if line.is_level else line.xs(across)[-1]
    return end_label(line.label, line.colour, (end, line.ys[-1]), (label_place(across), height))


def label_px(labels: Sequence[str]) -> int:
    """Return the width of the longest label in pixels."""
    return 12 + round(7.0 * max(map(len, labels)))


@dataclass(frozen=True)
class PanelAxis:
    """Title, note and vertical axis of a panel."""

    title: str
    scale: AxisScale
    note: str = ""
    """Text in the middle of a panel without curves."""
    is_share: bool = False
    """Whether its values are per cent."""


def panel_layout(
    panels: Sequence[PanelAxis],
    across: AxisScale,
    across_title: str,
    marks: Sequence[float],
    label_px: int,
    columns: int,
) -> Json:
    """Return a layout with `columns` panels in a row; `marks` are the values that the horizontal axes name."""
    lines = math.ceil(len(panels) / columns)
    inside = lines * HEIGHT + (lines - 1) * GAP_HEIGHT
    gap_x = (label_px + LEFT) / (WIDE - LEFT - label_px) if columns > 1 else 0.0
    areas = grid(len(panels), columns, gap_x=gap_x, gap_y=GAP_HEIGHT / inside)
    layout: Json = {
        "height": inside + TOP + BOTTOM,
        "margin": {"l": LEFT, "r": label_px, "t": TOP, "b": BOTTOM},
        "annotations": [
            *[heading(plain(panel.title), area) for panel, area in zip(panels, areas, strict=True)],
            *[_note(panel.note, area) for panel, area in zip(panels, areas, strict=True) if panel.note],
        ],
    }
    for number, (panel, area) in enumerate(zip(panels, areas, strict=True)):
        layout[numbered("xaxis", number)] = axis(
            across_title,
            domain=area.x,
            anchor=numbered("y", number),
            showgrid=False,
            type="log" if across.logarithmic else "linear",
            range=across.ends,
            tickvals=list(marks),
            ticktext=[str(mark) for mark in marks],
        )
        layout[numbered("yaxis", number)] = _vertical(panel) | {"domain": area.y, "anchor": numbered("x", number)}
    return layout


def _vertical(panel: PanelAxis) -> Json:
    scale = panel.scale
    if scale.logarithmic:
        marks = ticks(scale.low, scale.high)
        return axis(type="log", range=scale.ends, tickvals=marks, ticktext=[tick_label(mark) for mark in marks])
    return axis(range=scale.ends, nticks=6, **({"ticksuffix": "%"} if panel.is_share else {}))


def _note(text: str, panel: Panel) -> Json:
    """Return a note in the middle of a panel without curves."""
    middle: Json = {"x": sum(panel.x) / 2, "y": sum(panel.y) / 2}
    lines = plain(text).replace(", ", ",<br>")
    return (
        heading(lines, panel, raised=0)
        | middle
        | {
            "xanchor": "center",
            "yanchor": "middle",
            "font": {"size": LABEL_SIZE, "color": "@muted"},
        }
    )
