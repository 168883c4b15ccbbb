"""Plot of the bandwidth of all-reduces by size, with the bandwidth of the links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from paceline.analysis.comparison import Comparison
from paceline.formatting import RATES, Unit, binary_size, plural, unit_for
from paceline.records.examination import AllReduceTimes, MeasuredLinks
from paceline.report.plots.drawing import LABEL_SIZE, LINE, Json, axis, base_layout, hover_value, rounded
from paceline.report.plots.palette import COLOURS, NEUTRALS

HEIGHT = 280
MARKED_EVERY = 2
"""Sizes grow by a factor of four; every second one is labelled on the axis."""


class _LinkCurve(NamedTuple):
    """All-reduces over a set of ranks."""

    label: str
    colour: str
    measured: AllReduceTimes


def link(comparison: Comparison) -> Json | None:
    """Return the plot; None where the link was not measured."""
    if comparison.examination is None or comparison.examination.link is None:
        return None
    found = comparison.examination.link
    curves = _curves(found)
    levels = _levels(found)
    values = [point.busbw_bytes_per_s for curve in curves for point in curve.measured.points]
    unit = unit_for([max(values)], RATES)
    sizes = sorted({point.bytes for curve in curves for point in curve.measured.points})
    return {
        "title": "Bandwidth against size",
        "data": [_line(curve, unit) for curve in curves],
        "layout": _layout(curves, levels, sizes, unit),
    }


def _curves(found: MeasuredLinks) -> list[_LinkCurve]:
    """Return the curve of all ranks, then of the slowest host, since all wait for it, then of one rank per host."""
    all_ranks, *parts = found.all_reduces
    curves = [_LinkCurve(f"all-reduce, {plural(len(all_ranks.ranks), 'rank')}", COLOURS[0], all_ranks)]
    within = [part for part in parts if part.within_host]
    if within:
        slowest = min(within, key=lambda part: part.best.busbw_bytes_per_s)
        curves.append(_LinkCurve("within a host", COLOURS[2], slowest))
    curves += [_LinkCurve("one rank per host", COLOURS[1], part) for part in parts if not part.within_host]
    return curves


def _levels(found: MeasuredLinks) -> list[tuple[str, float]]:
    """Return the point-to-point bandwidth of the slowest link within a host and between hosts."""
    kinds = ((True, "point to point"), (False, "point to point between hosts"))
    slowest = [(name, [pair.bytes_per_s for pair in found.of(within_host=within)]) for within, name in kinds]
    return [(name, min(values)) for name, values in slowest if values]


def _line(curve: _LinkCurve, unit: Unit) -> Json:
    points = curve.measured.points
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [point.bytes for point in points],
        "y": rounded(point.busbw_bytes_per_s / unit.scale for point in points),
        "name": curve.label,
        "meta": curve.label,
        "customdata": [binary_size(point.bytes) for point in points],
        "line": {"color": curve.colour, "width": LINE},
        "marker": {"color": curve.colour, "size": 5},
        "cliponaxis": False,
        "hovertemplate": f"%{{meta}}, %{{customdata}}: {hover_value('y', unit)}<extra></extra>",
    }


def _layout(
    curves: Sequence[_LinkCurve], levels: Sequence[tuple[str, float]], sizes: Sequence[int], unit: Unit
) -> Json:
    marked = sizes[::MARKED_EVERY]
    top = max([value for _, value in levels] + [curve.measured.best.busbw_bytes_per_s for curve in curves])
    return base_layout(HEIGHT, left=64, top=40) | {
        "showlegend": True,  # Labels beside the curves would overlap them.
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"color": "@ink"}},
        "hovermode": "closest",
        "xaxis": axis(
            "size of the tensor",
            type="log",
            showgrid=False,
            range=[math.log10(sizes[0] / 1.5), math.log10(sizes[-1] * 1.5)],
            tickvals=marked,
            ticktext=[binary_size(size) for size in marked],
        ),
        "yaxis": axis(f"busbw, {unit.name}", range=[0, 1.12 * top / unit.scale]),
        "shapes": [_level(value / unit.scale) for _, value in levels],
        "annotations": [_note(name, sizes[0], value / unit.scale) for name, value in levels],
    }


def _level(value: float) -> Json:
    line = {"color": NEUTRALS[0], "width": 1, "dash": "dash"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": value, "y1": value, "line": line}


def _note(text: str, size: int, value: float) -> Json:
    return {
        "text": text,
        "xref": "x",
        "x": math.log10(size),
        "xanchor": "left",
        "yref": "y",
        "y": value,
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": LABEL_SIZE, "color": "@muted"},
    }
