"""Plot of the time of every step of every rank in the first repeat: a panel per candidate, all on one scale."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.analysis.curves import step_times, thinned
from paceline.formatting import TIMES, Unit, seconds, tick_label, unit_for
from paceline.report.plots.drawing import (
    Json,
    axis,
    base_layout,
    grid,
    hover_value,
    numbered,
    points_per_curve,
    rank_line,
    rounded,
    short_names,
    ticks,
)
from paceline.report.plots.palette import colours
from paceline.report.plots.rank_panels import COLUMNS, POINTS, block_headings, ranks_to_draw

PLOT_HEIGHT, GAP_HEIGHT, TOP, BOTTOM = 124, 46, 30, 40


@dataclass(frozen=True)
class _StepTimePanel:
    """Data of one panel."""

    row: CandidateRow
    ranks: dict[int, list[float]]
    """Seconds of every step, by rank."""


def step_time_plot(comparison: Comparison) -> Json | None:
    """Return the plot; None where no step was recorded."""
    panels = [
        _StepTimePanel(row, ranks) for row in comparison.rows if (ranks := _first_run(comparison, row.candidate.name))
    ]
    if not panels:
        return None
    colour_of = colours(comparison.record_set.candidates)
    unit = unit_for([value for panel in panels for values in panel.ranks.values() for value in values], TIMES)
    points = points_per_curve(POINTS, sum(len(panel.ranks) for panel in panels))
    data: list[Json] = []
    for number, panel in enumerate(panels):
        axes = {"xaxis": numbered("x", number), "yaxis": numbered("y", number)}
        colour = colour_of[panel.row.candidate.name]
        data += [trace | axes for trace in [*_lines(panel, colour, points, unit), _first_steps(panel, colour, unit)]]
    return {
        "title": "Time of every step",
        "data": data,
        "layout": _layout(panels, unit, COLUMNS),
        "narrow": _layout(panels, unit, 1),
    }


def _first_run(comparison: Comparison, name: str) -> dict[int, list[float]]:
    """Return the step times of each rank; of many ranks, those of the fastest and slowest, which show stragglers."""
    runs = comparison.record_set.runs_of(name)
    if not runs:
        return {}
    times = step_times(runs[min(runs)])
    ordered = sorted(times, key=lambda rank: statistics.median(times[rank]))
    return {rank: times[rank] for rank in ranks_to_draw(ordered)}


def _lines(panel: _StepTimePanel, colour: str, points: int, unit: Unit) -> list[Json]:
    """Return a line per rank."""
    found = []
    for place, (rank, values) in enumerate(panel.ranks.items()):
        kept = thinned(values, points)
        found.append(
            rank_line(
                place,
                rank,
                colour,
                x=kept,
                y=rounded(_scaled(values[i], unit) for i in kept),
                hovertemplate=f"%{{meta}}, step %{{x}}: {hover_value('y', unit)}<extra></extra>",
            )
        )
    return found


def _first_steps(panel: _StepTimePanel, colour: str, unit: Unit) -> Json:
    """Return circles around the first step of every rank."""
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [0] * len(panel.ranks),
        "y": rounded(_scaled(values[0], unit) for values in panel.ranks.values()),
        "marker": {"symbol": "circle-open", "color": colour, "size": 8, "line": {"width": 1.6}},
        "cliponaxis": False,
        "customdata": list(panel.ranks),
        "hovertemplate": f"rank %{{customdata}}, first step: {hover_value('y', unit)}<extra></extra>",
    }


def _scaled(value: float, unit: Unit) -> float:
    """Return a time in the plot's unit; NaN for 0, which a logarithmic axis lacks."""
    return value / unit.scale if value > 0 else math.nan


def _layout(panels: Sequence[_StepTimePanel], unit: Unit, columns: int) -> Json:
    columns = min(columns, len(panels))
    lines = math.ceil(len(panels) / columns)
    height = lines * PLOT_HEIGHT + (lines - 1) * GAP_HEIGHT
    places = grid(len(panels), columns, gap_x=0.045, gap_y=GAP_HEIGHT / height)
    layout = base_layout(height + TOP + BOTTOM, left=58, right=8, top=TOP, bottom=BOTTOM)
    layout |= {"hovermode": "closest", "annotations": []}
    last = max(1, *[len(values) - 1 for panel in panels for values in panel.ranks.values()])
    scale = _time_axis(panels, unit)
    names = short_names([panel.row.candidate.name for panel in panels])
    for number, (panel, place) in enumerate(zip(panels, places, strict=True)):
        at_left, at_bottom = number % columns == 0, number + columns >= len(panels)
        layout[numbered("xaxis", number)] = axis(
            "step" if at_bottom else None,
            domain=place.x,
            anchor=numbered("y", number),
            showgrid=False,
            nticks=6,
            showticklabels=at_bottom,
            range=[-0.02 * last, 1.01 * last],
        )
        title = {"title": axis(unit.name)["title"]} if at_left else {}
        sides = {"domain": place.y, "anchor": numbered("x", number), "showticklabels": at_left}
        layout[numbered("yaxis", number)] = scale | sides | title
        step_s = "" if panel.row.step_s is None else seconds(panel.row.step_s.value)
        layout["annotations"] += block_headings(names[panel.row.candidate.name], step_s, place)
    return layout


def _time_axis(panels: Sequence[_StepTimePanel], unit: Unit) -> Json:
    """Return a logarithmic axis, so that the first step does not flatten the others."""
    values = [v / unit.scale for panel in panels for values in panel.ranks.values() for v in values if v > 0] or [1.0]
    low, high = min(values) / 1.08, max(values) * 1.12
    marks = ticks(low, high)
    reach = [math.log10(low), math.log10(high)]
    return axis(type="log", range=reach, tickvals=marks, ticktext=[tick_label(mark) for mark in marks])
