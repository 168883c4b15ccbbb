"""Plot of the training loss of every run over steps, epochs and wall time, with the learning rate below it.

The page shows one repeat at a time. Each repeat has its own seed, so a band over repeats would show the spread between
seeds, which is large, and hide the differences between strategies, which are small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.analysis.curves import LearningRateCurve, LossCurve, learning_rate_curve, loss_curve, thinned
from paceline.formatting import LOSS, SHORT_IN_PLOTLY, tick_label
from paceline.report.plots.drawing import (
    FLATTENING,
    LEAST_POINTS,
    LINE,
    Json,
    axis,
    base_layout,
    finite,
    hover_value,
    loss_axis,
    plain,
    points_per_curve,
    rounded,
    whole_ticks,
)
from paceline.report.plots.palette import colours
from paceline.report.plots.stripes import stripes

POINTS = 16_000
"""Most points of all curves of losses together."""
RATE_POINTS = 2 * LEAST_POINTS
"""Most points of the learning rate of one run: schedules are smooth, or have a few steps."""
DASHES = {"candidate": "solid", "bound": "dot", "baseline": "dash"}
RATE_SHARE, GAP = 0.2, 0.06
"""Height of the panel of the learning rate, and the gap above it, as shares of the plot."""


@dataclass(frozen=True)
class _RunCurve:
    """Loss curve of one run."""

    row: CandidateRow
    repeat: int
    losses: LossCurve
    rates: LearningRateCurve

    @property
    def name(self) -> str:
        return self.row.candidate.name


def losses(comparison: Comparison) -> Json | None:
    """Return the plot, with the data for all its controls; None where there is no loss to draw."""
    curves = _curves(comparison)
    if not curves:
        return None
    colour_of = colours(comparison.record_set.candidates)
    kept = [thinned(curve.losses.losses, points_per_curve(POINTS, len(curves))) for curve in curves]
    first = min(curve.repeat for curve in curves)
    with_rates = [curve for curve in curves if curve.rates.steps]
    scales = _scales(curves, domain=[RATE_SHARE + GAP, 1] if with_rates else [0, 1])
    layout = base_layout(460 if with_rates else 380, left=64)
    layout |= {
        "xaxis": axis("step", showgrid=False, **whole_ticks(_longest(curves))),
        "yaxis": scales[str(first)],
        "hovermode": "closest",
    }
    if with_rates:
        layout["xaxis"]["anchor"] = "y2"
        layout["yaxis2"] = _rate_scale(with_rates) | {"domain": [0, RATE_SHARE]}
    return {
        "title": "Training loss",
        "data": [
            *[
                _line(curve, indices, colour_of[curve.name], visible=curve.repeat == first)
                for curve, indices in zip(curves, kept, strict=True)
            ],
            *[_rate_line(curve, colour_of[curve.name], visible=curve.repeat == first) for curve in with_rates],
        ],
        "layout": layout,
        "narrow": layout | {"height": 400 if with_rates else 320, "margin": {"l": 48, "r": 8, "t": 12, "b": 44}},
        "candidates": [curve.name for curve in (*curves, *with_rates)],
        "repeats": [curve.repeat for curve in (*curves, *with_rates)],
        "axes": _x_axes(curves, kept, with_rates),
        "first_axis": first_axis(comparison),
        "scales": scales,
    }


def first_axis(comparison: Comparison) -> str:
    """Return the label of the horizontal axis to show first: with different batches, steps are not comparable."""
    batches = {entry.run.topology.batch for entry in comparison.record_set.runs}
    return "Step" if len(batches) == 1 else "Epoch"


def _longest(curves: Sequence[_RunCurve]) -> int:
    return max(len(curve.losses.losses) for curve in curves)


def _curves(comparison: Comparison) -> list[_RunCurve]:
    """Return every run that has losses, the best last, so that it is drawn on top; of many repeats the first ones."""
    repeats = sorted({entry.repeat for entry in comparison.record_set.runs})
    shown = repeats[: max(1, POINTS // LEAST_POINTS // max(1, len(comparison.rows)))]
    found = []
    for row in reversed(comparison.rows):
        runs = comparison.record_set.runs_of(row.candidate.name)
        for number, repeat in enumerate(shown):
            if repeat in runs:
                run = runs[repeat]
                curve = _RunCurve(row, number, loss_curve(run), _thinned_rates(learning_rate_curve(run)))
                found += [curve] if finite(curve.losses.losses) else []
    return found


def _line(curve: _RunCurve, indices: Sequence[int], colour: str, *, visible: bool) -> Json:
    divergence = curve.losses.divergence
    line: Json = {
        "type": "scatter",
        "mode": "lines",
        "x": list(indices),
        "y": rounded(curve.losses.losses[i] for i in indices),
        "showlegend": False,
        "meta": plain(curve.name) + ("" if divergence is None else f" (diverged at step {divergence.step})"),
        "visible": visible,
        "line": {"color": colour, "width": LINE, "simplify": False},
        "hovertemplate": f"%{{meta}}: {hover_value('y', LOSS)}<extra></extra>",
    }
    if divergence is None:
        return line
    # Without a finite next point the curve just ends: a cross shows that it diverged.
    last = max((i for i in indices if i < divergence.step), default=None)
    sizes = [10 if i == last else 0 for i in indices]
    return line | {
        "mode": "lines+markers",
        "marker": {"color": colour, "symbol": "x-thin", "size": sizes, "line": {"color": colour, "width": 2}},
    }


def _thinned_rates(curve: LearningRateCurve) -> LearningRateCurve:
    kept = thinned(curve.rates, RATE_POINTS)
    return LearningRateCurve(steps=[curve.steps[i] for i in kept], rates=[curve.rates[i] for i in kept])


def _rate_line(curve: _RunCurve, colour: str, *, visible: bool) -> Json:
    """Return the learning rate of a run, in the lower panel; a single point is marked."""
    return {
        "type": "scatter",
        "mode": "lines" if len(curve.rates.steps) > 1 else "markers",
        "x": curve.rates.steps,
        "y": rounded(curve.rates.rates),
        "xaxis": "x",
        "yaxis": "y2",
        "showlegend": False,
        "meta": plain(curve.name),
        "visible": visible,
        "line": {"color": colour, "width": LINE, "simplify": False},
        "marker": {"color": colour, "size": 5},
        "hovertemplate": f"%{{meta}}: learning rate %{{y:{SHORT_IN_PLOTLY}}}<extra></extra>",
    }


def _scales(curves: Sequence[_RunCurve], domain: list[float]) -> dict[str, Json]:
    """Return the loss axis of each repeat, and of all: one repeat may diverge where another does not."""
    repeats = sorted({curve.repeat for curve in curves})
    of_one = {str(repeat): _scale([curve for curve in curves if curve.repeat == repeat]) for repeat in repeats}
    return {key: scale | {"domain": domain} for key, scale in (of_one | {"all": _scale(curves)}).items()}


def _scale(curves: Sequence[_RunCurve]) -> Json:
    return loss_axis("training loss", [loss for curve in curves for loss in curve.losses.losses])


def _rate_scale(curves: Sequence[_RunCurve]) -> Json:
    """Return the axis of learning rates; LARS has one that is a thousand times as high as that of SGD."""
    peaks = [peak for curve in curves if (peak := max(finite(curve.rates.rates), default=0.0)) > 0]
    if not peaks or max(peaks) <= FLATTENING * min(peaks):
        return axis("learning rate", nticks=3, rangemode="tozero")
    low, high = math.log10(min(peaks)) - 0.4, math.log10(max(peaks)) + 0.2
    marks = [10.0**exponent for exponent in range(math.ceil(low), math.floor(high) + 1)]
    labels = [tick_label(mark) for mark in marks]
    return axis("learning rate", type="log", range=[low, high], tickvals=marks, ticktext=labels)


def _x_axes(curves: Sequence[_RunCurve], kept: Sequence[Sequence[int]], with_rates: Sequence[_RunCurve]) -> list[Json]:
    """Return the horizontal axes to choose from, with dashes: curves that coincide are drawn striped.

    They are those of the losses, then those of the learning rates.
    """
    lines = [*zip(curves, kept, strict=True), *[(curve, curve.rates.steps) for curve in with_rates]]
    of_losses = stripes({curve.name: curve.losses.losses for curve in curves if curve.repeat == 0})
    of_rates = stripes({curve.name: curve.rates.rates for curve in with_rates if curve.repeat == 0})
    own = [DASHES[curve.row.candidate.role] for curve, _ in lines]
    by_name = [of_losses] * len(curves) + [of_rates] * len(with_rates)
    striped = [dashes.get(curve.name, dash) for (curve, _), dash, dashes in zip(lines, own, by_name, strict=True)]
    axes: list[Json] = [{"label": "Step", "title": "step", "x": [list(steps) for _, steps in lines], "dashes": striped}]
    if all(curve.losses.epochs for curve in curves):
        x = [rounded((curve.losses.epochs or [])[step] for step in steps) for curve, steps in lines]
        axes.append({"label": "Epoch", "title": "epoch", "x": x, "dashes": striped})
    x = [rounded(curve.losses.wall_s[step] for step in steps) for curve, steps in lines]
    return [*axes, {"label": "Wall time", "title": "wall time, s", "x": x, "dashes": own}]
