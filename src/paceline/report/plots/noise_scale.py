"""Plot of the gradient noise scale over the steps of training, one line for each run, on a logarithmic axis."""

from __future__ import annotations

import math

from paceline.analysis.comparison import Comparison
from paceline.analysis.curves import thinned
from paceline.analysis.noise_scale import NoiseCurve, noise_curve
from paceline.formatting import SHORT_IN_PLOTLY
from paceline.report.plots.drawing import (
    LINE,
    Json,
    axis,
    base_layout,
    finite,
    plain,
    points_per_curve,
    rounded,
    whole_ticks,
)
from paceline.report.plots.palette import colours

POINTS = 4_000
"""Most points of all curves together."""


def noise_scales(comparison: Comparison) -> Json | None:
    """Return the plot; None if the noise scale of no run was measured in at least two windows."""
    curves = [
        (row.candidate.name, number, curve)
        for row in comparison.rows
        for number, run in enumerate(comparison.record_set.runs_of(row.candidate.name).values(), start=1)
        if len(finite((curve := noise_curve(run)).values)) > 1
    ]
    if not curves:
        return None
    colour_of = colours(comparison.record_set.candidates)
    points = points_per_curve(POINTS, len(curves))
    last = max(curve.steps[-1] for _, _, curve in curves)
    return {
        "title": "Gradient noise scale over the steps of training",
        "data": [_line(name, number, curve, colour_of[name], points) for name, number, curve in curves],
        "layout": base_layout(300, left=76)
        | {
            "hovermode": "closest",
            "xaxis": axis("step", showgrid=False, rangemode="tozero", **whole_ticks(last)),
            "yaxis": axis("noise scale, samples", type="log", nticks=6),
        },
        "candidates": [name for name, _, _ in curves],
    }


def _line(name: str, number: int, curve: NoiseCurve, colour: str, points: int) -> Json:
    kept = thinned([math.log(value) if value > 0 else math.nan for value in curve.values], points)
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [curve.steps[index] for index in kept],
        "y": rounded(curve.values[index] for index in kept),
        "showlegend": False,
        "meta": f"{plain(name)} (repeat {number})",
        "line": {"color": colour, "width": LINE, "simplify": False},
        "hovertemplate": f"%{{meta}}, step %{{x}}: %{{y:{SHORT_IN_PLOTLY}}} samples<extra></extra>",
    }
