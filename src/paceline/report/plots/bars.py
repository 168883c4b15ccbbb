"""Plot of the medians as bars with intervals: a panel per figure, a bar per candidate, best first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.analysis.statistics import Estimate
from paceline.report.figures.candidates import CANDIDATE_FIGURES
from paceline.report.figures.columns import Cell, Column, page_columns
from paceline.report.plots.drawing import (
    LABEL_SIZE,
    LONGEST_LABEL,
    Json,
    Panel,
    axis,
    base_layout,
    finite,
    grid,
    heading,
    numbered,
    plain,
    short_names,
)
from paceline.report.plots.palette import colours

PANELS = ("step_s", "train_loss", "test_loss", "test_accuracy")
"""Figures with a panel, if they were measured."""
OUTLIER = 4.0
"""Ratio to the next longest bar from which a bar is cut off, and labelled so, since it would flatten the others."""
BAR_HEIGHT, TITLE_HEIGHT, BELOW = 30, 34, 8
LABEL_ROOM = 1.42
"""Axis length ÷ longest bar, so that the number after the bar fits."""


def bars(comparison: Comparison) -> Json | None:
    """Return the plot of time per step, losses and accuracy; None where nothing was measured."""
    rows = [row for row in comparison.rows if row.step_s is not None]
    by_key = {column.key: column for column in page_columns(CANDIDATE_FIGURES, rows)}
    columns = [by_key[key] for key in PANELS if key in by_key and not by_key[key].is_empty]
    if not rows or not columns:
        return None
    colour_of = colours(comparison.record_set.candidates)
    reaches = [_reach([getattr(row, column.key) for row in rows]) for column in columns]
    data: list[Json] = []
    for number, (column, reach) in enumerate(zip(columns, reaches, strict=True)):
        axes = {"xaxis": numbered("x", number), "yaxis": numbered("y", number)}
        shown = _bars_of(rows, column, reach)
        data += [trace | axes for trace in (_bar_trace(shown, column, colour_of), _label_trace(shown))]
    return {
        "title": "Medians with their intervals",
        "data": data,
        "layout": _layout(rows, columns, reaches, len(columns)),
        "medium": _layout(rows, columns, reaches, 2),
        "narrow": _layout(rows, columns, reaches, 1),
    }


@dataclass(frozen=True)
class _EstimateBar:
    """One bar of a panel, cut to the range of its axis."""

    place: int
    row: CandidateRow
    length: float
    low: float | None
    high: float | None
    cell: Cell
    is_cut: bool
    has_few_repeats: bool


def _bars_of(rows: Sequence[CandidateRow], column: Column, reach: tuple[float, float]) -> list[_EstimateBar]:
    found = []
    for place, row in enumerate(rows):
        estimate: Estimate | None = getattr(row, column.key)
        if estimate is None:
            continue
        is_cut = estimate.value > reach[1]
        low = None if is_cut or estimate.low is None else max(estimate.low, reach[0])
        high = None if is_cut or estimate.high is None else min(estimate.high, reach[1])
        length = 0.6 * reach[1] if is_cut else estimate.value
        found.append(_EstimateBar(place, row, length, low, high, column.cells[place], is_cut, bool(estimate.each)))
    return found


def _bar_trace(shown: Sequence[_EstimateBar], column: Column, colour_of: dict[str, str]) -> Json:
    """Return the bars: solid for candidates, pale for bounds and baselines."""
    tints = [colour_of[bar.row.candidate.name] for bar in shown]
    solid = [bar.row.candidate.role == "candidate" for bar in shown]
    about = [[plain(bar.row.candidate.name), bar.cell.text, _repeats_text(bar)] for bar in shown]
    return {
        "type": "bar",
        "orientation": "h",
        "x": [bar.length for bar in shown],
        "y": [bar.place for bar in shown],
        "width": 0.56,
        "marker": {
            "color": [tint if full else f"{tint}2e" for tint, full in zip(tints, solid, strict=True)],
            "line": {"color": tints, "width": 1.2},
        },
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [None if bar.high is None else bar.high - bar.length for bar in shown],
            "arrayminus": [None if bar.low is None else bar.length - bar.low for bar in shown],
            "color": "@ink",
            "thickness": 1.2,
            "width": 3,
        },
        "customdata": about,
        "hovertemplate": f"%{{customdata[0]}}<br>{plain(column.heading)}: %{{customdata[1]}}{column.unit.ending}"
        "<br>%{customdata[2]}<extra></extra>",
    }


def _repeats_text(bar: _EstimateBar) -> str:
    """Return the interval of a bar, or the values of the repeats that are too few for one."""
    if not bar.cell.interval:
        return "one repeat"
    return f"{'both repeats' if bar.has_few_repeats else '95% interval'}: {bar.cell.interval}"


def _label_trace(shown: Sequence[_EstimateBar]) -> Json:
    """Return the numbers after the bars and their intervals."""
    return {
        "type": "scatter",
        "mode": "text",
        "x": [bar.length if bar.high is None else bar.high for bar in shown],
        "y": [bar.place for bar in shown],
        "text": [f"  {bar.cell.text}{' (bar cut)' if bar.is_cut else ''}" for bar in shown],
        "textposition": "middle right",
        "textfont": {"color": "@ink", "size": LABEL_SIZE},
        "cliponaxis": False,
        "hoverinfo": "skip",
    }


def _reach(estimates: Sequence[Estimate | None]) -> tuple[float, float]:
    """Return the range of the axis: all values but outliers, and intervals that are not much wider than that."""
    known = [estimate for estimate in estimates if estimate is not None]
    values = sorted(finite([estimate.value for estimate in known]))
    while len(values) > 1 and values[-1] > OUTLIER * max(values[-2], 0) > 0:
        values.pop()
    longest = max([*values, 0.0]) or 1.0
    highs = [e.high for e in known if e.high is not None and e.value <= longest]
    return min([0.0, *values]), max([longest, *[min(high, 1.4 * longest) for high in highs]])


def _layout(
    rows: Sequence[CandidateRow], columns: Sequence[Column], reaches: Sequence[tuple[float, float]], across: int
) -> Json:
    """Return a layout with `across` panels in a row."""
    across = min(across, len(columns))
    lines, tall = math.ceil(len(columns) / across), BAR_HEIGHT * len(rows)
    names = short_names([row.candidate.name for row in rows], LONGEST_LABEL if across > 1 else 18)
    left = 18 + round(7.2 * max(len(name) for name in names.values()))
    inside = lines * (tall + TITLE_HEIGHT) - TITLE_HEIGHT
    panels = grid(len(columns), across, gap_x=0.035, gap_y=TITLE_HEIGHT / inside)
    layout = base_layout(inside + TITLE_HEIGHT + BELOW, left=left, right=4, top=TITLE_HEIGHT, bottom=BELOW)
    layout["annotations"] = [_title(column, panel) for column, panel in zip(columns, panels, strict=True)]
    layout["bargap"] = 0
    layout["shapes"] = _bound_line(rows, columns)
    for number, (panel, reach) in enumerate(zip(panels, reaches, strict=True)):
        layout[numbered("xaxis", number)] = axis(
            domain=panel.x,
            anchor=numbered("y", number),
            range=[reach[0], reach[0] + (reach[1] - reach[0]) * LABEL_ROOM],
            showgrid=False,
            showticklabels=False,
        )
        layout[numbered("yaxis", number)] = axis(
            domain=panel.y,
            anchor=numbered("x", number),
            range=[len(rows) - 0.5, -0.5],
            showgrid=False,
            showline=True,
            linecolor="@grid",
            showticklabels=number % across == 0,
            tickvals=list(range(len(rows))),
            ticktext=[f"{plain(name)}  " for name in names.values()],
            tickfont={"color": "@ink", "size": LABEL_SIZE},
        )
    return layout


def _bound_line(rows: Sequence[CandidateRow], columns: Sequence[Column]) -> list[Json]:
    """Return a line at the bound's time; the time of candidates beyond it is the cost of communication."""
    bounds = [row.step_s.value for row in rows if row.candidate.role == "bound" and row.step_s is not None]
    if len(bounds) != 1 or columns[0].key != "step_s":
        return []
    line = {"color": "@muted", "width": 1, "dash": "dot"}
    ends = {"x0": bounds[0], "x1": bounds[0], "y0": -0.5, "y1": len(rows) - 0.5}
    return [{"type": "line", "xref": "x", "yref": "y", "layer": "below", "line": line, **ends}]


def _title(column: Column, panel: Panel) -> Json:
    unit = f", {column.unit.name}" if column.unit.name else ""
    return heading(plain(column.heading + unit), panel)
