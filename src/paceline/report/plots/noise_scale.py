"""Plot of the gradient noise scale over training, one line for each run, on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.analysis.comparison import Comparison
from paceline.analysis.curves import thinned
from paceline.analysis.noise_scale import NoiseCurve, noise_curve
from paceline.formatting import SHORT_IN_PLOTLY, significant, tick_label
from paceline.report.plots.drawing import (
    LINE,
    Json,
    axis,
    base_layout,
    finite,
    plain,
    points_per_curve,
    rounded,
    ticks,
    whole_ticks,
)
from paceline.report.plots.palette import colours

POINTS = 4_000
"""Most points of all curves together."""


def noise_scales(comparison: Comparison) -> Json | None:
    """Return the plot; None if the noise scale of no run was measured in at least two windows.

    It is over epochs where runs have epochs of different numbers of steps, since large batches make few steps.
    """
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
    lengths = {curve.steps_per_epoch for _, _, curve in curves}
    unit = "epoch" if len(lengths) > 1 and None not in lengths else "step"
    last = max(_place(curve, -1, unit) for _, _, curve in curves)
    return {
        "title": f"Gradient noise scale over the {unit}s of training",
        "data": [_line(name, number, curve, colour_of[name], points, unit) for name, number, curve in curves],
        "layout": base_layout(300, left=76)
        | {
            "hovermode": "closest",
            "xaxis": axis(unit, showgrid=False, rangemode="tozero", **whole_ticks(math.ceil(last))),
            "yaxis": _scale(curves),
        },
        "candidates": [name for name, _, _ in curves],
    }


def _scale(curves: Sequence[tuple[str, int, NoiseCurve]]) -> Json:
    """Return the logarithmic axis; plotly would label the values between decades by their first digit alone."""
    values = [value for _, _, curve in curves for value in finite(curve.values)]
    marks = ticks(min(values) / 1.1, max(values) * 1.1)
    labels = [tick_label(mark) for mark in marks]
    return axis("noise scale, samples", type="log", tickvals=marks, ticktext=labels)


def _place(curve: NoiseCurve, index: int, unit: str) -> float:
    """Return the step of a point, or the epochs until then."""
    step = curve.steps[index]
    return step if unit == "step" else significant(step / (curve.steps_per_epoch or 1), 5)


def _line(name: str, number: int, curve: NoiseCurve, colour: str, points: int, unit: str) -> Json:
    kept = thinned([math.log(value) if value > 0 else math.nan for value in curve.values], points)
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [_place(curve, index, unit) for index in kept],
        "y": rounded(curve.values[index] for index in kept),
        "showlegend": False,
        "meta": f"{plain(name)} (repeat {number})",
        "line": {"color": colour, "width": LINE, "simplify": False},
        "hovertemplate": f"%{{meta}}, {unit} %{{x}}: %{{y:{SHORT_IN_PLOTLY}}} samples<extra></extra>",
    }
