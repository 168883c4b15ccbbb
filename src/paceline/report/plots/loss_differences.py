"""Plot of the relative difference between the losses of lossless runs and the reference, by step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.analysis.comparison import Comparison
from paceline.analysis.curves import relative_differences, thinned
from paceline.analysis.loss_difference import VISIBLE, LossDifference, first_pair
from paceline.formatting import SCIENTIFIC_IN_PLOTLY, tick_label
from paceline.report.plots.drawing import (
    LABEL_SIZE,
    LINE,
    Json,
    axis,
    base_layout,
    decades,
    finite,
    plain,
    points_per_curve,
    rounded,
    shortened,
    whole_ticks,
)
from paceline.report.plots.palette import colours

POINTS = 4_000
"""Most points of all curves together."""


def loss_differences(comparison: Comparison) -> Json | None:
    """Return the plot; None where all losses are identical to the last bit."""
    differing = [difference for difference in comparison.loss_differences if difference.first_step is not None]
    if not differing:
        return None
    colour_of = colours(comparison.record_set.candidates)
    curves = [_differences(comparison, difference) for difference in differing]
    points = points_per_curve(POINTS, len(curves))
    return {
        "title": "Relative loss difference at every step",
        "data": [
            _line(difference.candidate, curve, colour_of[difference.candidate], points)
            for difference, curve in zip(differing, curves, strict=True)
        ],
        "layout": _layout(differing[0].reference, curves),
        "candidates": [difference.candidate for difference in differing],
    }


def _differences(comparison: Comparison, loss_difference: LossDifference) -> list[float]:
    """Return the differences in the compared repeat; NaN for 0 and infinity, which a logarithmic axis lacks."""
    pair = first_pair(comparison.record_set, loss_difference.candidate, loss_difference.reference)
    assert pair is not None, "there is a difference"
    return [value if 0 < value < math.inf else math.nan for value in relative_differences(*pair)]


def _line(name: str, differences: Sequence[float], colour: str, points: int) -> Json:
    kept = thinned(differences, points)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": kept,
        "y": rounded(differences[i] for i in kept),
        "showlegend": False,
        "meta": plain(name),
        "line": {"color": colour, "width": LINE, "simplify": False},
        "marker": {"color": colour, "size": 4},
        "hovertemplate": f"%{{meta}}, step %{{x}}: %{{y:{SCIENTIFIC_IN_PLOTLY}}}<extra></extra>",
    }


def _layout(reference: str, curves: Sequence[Sequence[float]]) -> Json:
    seen = finite([value for curve in curves for value in curve])
    low, high = min([VISIBLE, *seen]) / 2, max([VISIBLE, *seen]) * 2
    marks = decades(low, high)
    return base_layout(280, left=76) | {
        "hovermode": "closest",
        "xaxis": axis("step", showgrid=False, rangemode="tozero", **whole_ticks(max(map(len, curves)))),
        "yaxis": axis(
            f"difference from {plain(shortened(reference, 16))}",
            type="log",
            range=[math.log10(low), math.log10(high)],
            tickvals=marks,
            ticktext=[tick_label(mark) for mark in marks],
        ),
        "shapes": [_visible_line()],
        "annotations": [_visible_note(curves)],
    }


def _visible_line() -> Json:
    line = {"color": "@muted", "width": 1, "dash": "dot"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": VISIBLE, "y1": VISIBLE, "line": line}


def _visible_note(curves: Sequence[Sequence[float]]) -> Json:
    """Return the label of the line, at the end where the curves are further away from it."""
    starts = [known[0] for curve in curves if (known := finite(curve[: len(curve) // 3 + 1]))]
    ends = [known[-1] for curve in curves if (known := finite(curve[-len(curve) // 3 :]))]
    at_left = _clearance(starts) >= _clearance(ends)
    return {
        "text": "0.1%: visible in a plot of the losses",
        "xref": "paper",
        "x": 0 if at_left else 1,
        "xanchor": "left" if at_left else "right",
        "yref": "y",
        "y": math.log10(VISIBLE),
        "yanchor": "bottom" if at_left else "top",
        "showarrow": False,
        "font": {"size": LABEL_SIZE, "color": "@muted"},
    }


def _clearance(values: Sequence[float]) -> float:
    """Return the distance of the nearest value from the line, in decades."""
    return min((abs(math.log10(value / VISIBLE)) for value in values), default=math.inf)
