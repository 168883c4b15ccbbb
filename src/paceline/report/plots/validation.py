"""Plot of test accuracy and test loss while training, over steps, epochs and training time.

A candidate has one line, the median over its repeats, and a thin line for each repeat if there are several.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.analysis.curves import EvaluatedPoint, thinned, validation_curve
from paceline.formatting import LOSS, SHORT_IN_PLOTLY
from paceline.report.plots.drawing import (
    LEAST_POINTS,
    LINE,
    Json,
    axis,
    base_layout,
    finite,
    hover_value,
    loss_axis,
    numbered,
    plain,
    points_per_curve,
    rounded,
    whole_ticks,
)
from paceline.report.plots.losses import DASHES, first_axis
from paceline.report.plots.palette import colours
from paceline.report.plots.stripes import stripes

POINTS = 8_000
"""Most points of all curves together."""
THIN = 1.0
PALE = 0.35
MOST_MARKERS = 40
"""Most points of a curve for which each is marked; more would hide the line."""


@dataclass(frozen=True)
class _Curve:
    """Evaluations of one run, or the medians over the runs of a candidate."""

    row: CandidateRow
    points: list[EvaluatedPoint]
    repeat: int | None
    """None for the line of the candidate."""

    @property
    def name(self) -> str:
        return self.row.candidate.name


@dataclass(frozen=True)
class _Panel:
    """Figure of an evaluation that has a panel."""

    value: Callable[[EvaluatedPoint], float]
    hover: str
    """Part of a tooltip's template that shows it."""


ACCURACY_PANEL = _Panel(
    lambda point: math.nan if point.accuracy is None else 100 * point.accuracy, f"accuracy %{{y:{SHORT_IN_PLOTLY}}}%"
)
LOSS_PANEL = _Panel(lambda point: point.loss, f"loss {hover_value('y', LOSS)}")


def validation(comparison: Comparison) -> Json | None:
    """Return the plot, with the data for its controls; None if no run was tested while it trained."""
    curves = _curves(comparison)
    if not curves:
        return None
    has_accuracy = any(point.accuracy is not None for curve in curves for point in curve.points)
    panels = [ACCURACY_PANEL, LOSS_PANEL] if has_accuracy else [LOSS_PANEL]
    drawn = [(curve, numbered("y", number), panel) for number, panel in enumerate(panels) for curve in curves]
    is_marked = len({curve.name for curve in curves}) == 1
    colour_of = colours(comparison.record_set.candidates)
    shown = [curve for curve, _, _ in drawn]
    layout = _layout(curves, has_accuracy=has_accuracy)
    heights = (480, 440) if has_accuracy else (340, 300)
    return {
        "title": "Test accuracy and test loss" if has_accuracy else "Test loss",
        "data": [
            _line(curve, panel, colour_of[curve.name], is_marked=is_marked) | {"xaxis": "x", "yaxis": side}
            for curve, side, panel in drawn
        ],
        "layout": layout | {"height": heights[0]},
        "narrow": layout | {"height": heights[1], "margin": {"l": 48, "r": 8, "t": 12, "b": 44}},
        "candidates": [curve.name for curve in shown],
        "axes": _x_axes(shown),
        "first_axis": first_axis(comparison),
    }


def _curves(comparison: Comparison) -> list[_Curve]:
    """Return the curves of all candidates that were tested while they trained, the best candidate last, on top."""
    found: list[_Curve] = []
    repeats = sorted({entry.repeat for entry in comparison.record_set.runs})
    drawn = repeats[: max(1, POINTS // LEAST_POINTS // 2 // max(1, len(comparison.rows)))]
    for row in reversed(comparison.rows):
        runs = comparison.record_set.runs_of(row.candidate.name)
        known = {repeat: curve for repeat, run in runs.items() if len(curve := validation_curve(run)) > 1}
        if not known:
            continue
        if len(known) > 1:
            found += [_Curve(row, known[key], number) for number, key in enumerate(drawn) if key in known]
        found.append(_Curve(row, _medians(list(known.values())), None))
    points = points_per_curve(POINTS, 2 * len(found))
    return [_thinned(curve, points) for curve in found if curve.points]


def _medians(curves: Sequence[Sequence[EvaluatedPoint]]) -> list[EvaluatedPoint]:
    """Return the medians over repeats, at the steps at which all of them were tested."""
    by_step = [{point.step: point for point in curve} for curve in curves]
    common = sorted(set.intersection(*map(set, by_step)))
    return [_median([points[step] for points in by_step]) for step in common]


def _median(points: Sequence[EvaluatedPoint]) -> EvaluatedPoint:
    losses = finite([point.loss for point in points])
    accuracies = [point.accuracy for point in points if point.accuracy is not None]
    return EvaluatedPoint(
        step=points[0].step,
        epochs=points[0].epochs,
        train_s=statistics.median(point.train_s for point in points),
        loss=statistics.median(losses) if len(losses) == len(points) else math.nan,
        accuracy=statistics.median(accuracies) if accuracies else None,
    )


def _thinned(curve: _Curve, most: int) -> _Curve:
    kept = thinned([point.loss for point in curve.points], most)
    return _Curve(curve.row, [curve.points[index] for index in kept], curve.repeat)


def _line(curve: _Curve, panel: _Panel, colour: str, *, is_marked: bool) -> Json:
    """Return the line of a curve. With `is_marked` each point is marked; those of curves that coincide would hide."""
    is_repeat = curve.repeat is not None
    has_markers = is_marked and not is_repeat and len(curve.points) <= MOST_MARKERS
    about = f" (repeat {curve.repeat + 1})" if curve.repeat is not None else ""
    return {
        "type": "scatter",
        "mode": "lines+markers" if has_markers else "lines",
        "x": [point.step for point in curve.points],
        "y": rounded(panel.value(point) for point in curve.points),
        "showlegend": False,
        "meta": plain(curve.name) + about,
        "opacity": PALE if is_repeat else 1,
        "line": {"color": colour, "width": THIN if is_repeat else LINE, "simplify": False},
        "marker": {"color": colour, "size": 5},
        "hovertemplate": f"%{{meta}}: {panel.hover}<extra></extra>",
    }


def _layout(curves: Sequence[_Curve], *, has_accuracy: bool) -> Json:
    last = max(point.step for curve in curves for point in curve.points)
    x = axis("step", showgrid=False, rangemode="tozero", **whole_ticks(last))
    layout = base_layout(480, left=64) | {"hovermode": "closest"}
    losses = [point.loss for curve in curves for point in curve.points]
    if not has_accuracy:
        return layout | {"xaxis": x, "yaxis": loss_axis("test loss", losses)}
    return layout | {
        "xaxis": x | {"anchor": "y2"},
        "yaxis": axis("test accuracy, %", nticks=6, domain=[0.45, 1]),
        "yaxis2": loss_axis("test loss", losses, nticks=5, domain=[0, 0.38]),
    }


def _x_axes(curves: Sequence[_Curve]) -> list[Json]:
    """Return the horizontal axes to choose from, with dashes: lines of candidates that coincide are drawn striped."""
    own = ["solid" if curve.repeat is not None else DASHES[curve.row.candidate.role] for curve in curves]
    losses = {curve.name: [point.loss for point in curve.points] for curve in curves if curve.repeat is None}
    by_name = stripes(losses)
    striped = [
        by_name.get(curve.name, dash) if curve.repeat is None else dash for curve, dash in zip(curves, own, strict=True)
    ]
    axes: list[Json] = [
        {"label": "Step", "title": "step", "x": [[p.step for p in curve.points] for curve in curves], "dashes": striped}
    ]
    epochs = [[point.epochs for point in curve.points if point.epochs is not None] for curve in curves]
    if all(len(known) == len(curve.points) for known, curve in zip(epochs, curves, strict=True)):
        axes.append({"label": "Epoch", "title": "epoch", "x": [rounded(own) for own in epochs], "dashes": striped})
    times = [rounded(point.train_s for point in curve.points) for curve in curves]
    return [*axes, {"label": "Training time", "title": "training time, s", "x": times, "dashes": own}]
