"""Plot of the training loss of every run over steps, epochs and wall time.

The page shows one repeat at a time. Each repeat has its own seed, so a band over repeats would show the spread between
seeds, which is large, and hide the differences between strategies, which are small.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.analysis.curves import LossCurve, loss_curve, relative_difference, thinned
from paceline.analysis.loss_difference import VISIBLE
from paceline.formatting import LOSS, tick_label
from paceline.report.plots.drawing import (
    LEAST_POINTS,
    LINE,
    Json,
    axis,
    base_layout,
    finite,
    hover_value,
    plain,
    points_per_curve,
    rounded,
    ticks,
    whole_ticks,
)
from paceline.report.plots.palette import colours

POINTS = 16_000
"""Most points of all curves together."""
DASHES = {"candidate": "solid", "bound": "dot", "baseline": "dash"}
FLATTENING = 20
"""Ratio of the largest loss to the median from which the axis is logarithmic."""


@dataclass(frozen=True)
class _RunCurve:
    """Loss curve of one run."""

    row: CandidateRow
    repeat: int
    losses: LossCurve

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
    scales = _scales(curves)
    layout = base_layout(380, left=64)
    layout |= {
        "xaxis": axis("step", showgrid=False, **whole_ticks(_longest(curves))),
        "yaxis": scales[str(first)],
        "hovermode": "closest",
    }
    return {
        "title": "Training loss",
        "data": [
            _line(curve, indices, colour_of[curve.name], visible=curve.repeat == first)
            for curve, indices in zip(curves, kept, strict=True)
        ],
        "layout": layout,
        "narrow": layout | {"height": 320, "margin": {"l": 48, "r": 8, "t": 12, "b": 44}},
        "candidates": [curve.name for curve in curves],
        "repeats": [curve.repeat for curve in curves],
        "axes": _x_axes(curves, kept),
        "scales": scales,
    }


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
                curve = _RunCurve(row, number, loss_curve(runs[repeat]))
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


def _scales(curves: Sequence[_RunCurve]) -> dict[str, Json]:
    """Return the loss axis of each repeat, and of all: one repeat may diverge where another does not."""
    repeats = sorted({curve.repeat for curve in curves})
    of_one = {str(repeat): _scale([curve for curve in curves if curve.repeat == repeat]) for repeat in repeats}
    return of_one | {"all": _scale(curves)}


def _scale(curves: Sequence[_RunCurve]) -> Json:
    values = finite([loss for curve in curves for loss in curve.losses.losses])
    if min(values) > 0 and max(values) > FLATTENING * statistics.median(values):
        marks = ticks(min(values) / 1.1, max(values) * 1.1)
        return axis("training loss", type="log", tickvals=marks, ticktext=[tick_label(mark) for mark in marks])
    return axis("training loss", nticks=6)


def _x_axes(curves: Sequence[_RunCurve], kept: Sequence[Sequence[int]]) -> list[Json]:
    """Return the horizontal axes to choose from, with dashes: curves that coincide are drawn striped."""
    stripes = _stripes(curves)
    own = [DASHES[curve.row.candidate.role] for curve in curves]
    striped = [stripes.get(curve.name, dash) for curve, dash in zip(curves, own, strict=True)]
    steps = [list(indices) for indices in kept]
    axes: list[Json] = [{"label": "Step", "title": "step", "x": steps, "dashes": striped}]
    epochs = [curve.losses.epochs for curve in curves]
    if all(epochs):
        x = [rounded(epoch[i] for i in k) for epoch, k in zip(epochs, kept, strict=True) if epoch is not None]
        axes.append({"label": "Epoch", "title": "epoch", "x": x, "dashes": striped})
    x = [rounded(curve.losses.wall_s[i] for i in k) for curve, k in zip(curves, kept, strict=True)]
    return [*axes, {"label": "Wall time", "title": "wall time, s", "x": x, "dashes": own}]


def _stripes(curves: Sequence[_RunCurve]) -> dict[str, str]:
    """Return dashes that fill each other's gaps, so that each of several coinciding curves is visible."""
    dashes = {}
    for names in _coincident(curves):
        length = 10 if len(names) <= 6 else 5
        for place, name in enumerate(names):
            before, after = length * place, length * (len(names) - place - 1)
            dashes[name] = f"0px,{before}px,{length}px,{after}px"
    return dashes


def _coincident(curves: Sequence[_RunCurve]) -> list[list[str]]:
    """Return groups of two or more candidates whose losses coincide in a plot, in the first repeat."""
    groups: list[list[_RunCurve]] = []
    for curve in (curve for curve in curves if curve.repeat == 0):
        alike = [group for group in groups if _coincide(group[0].losses.losses, curve.losses.losses)]
        if alike:
            alike[0].append(curve)
        else:
            groups.append([curve])
    return [[curve.name for curve in group] for group in groups if len(group) > 1]


def _coincide(ones: Sequence[float], others: Sequence[float]) -> bool:
    return len(ones) == len(others) and all(map(_is_close, ones, others))


def _is_close(one: float, other: float) -> bool:
    return relative_difference(one, other) < VISIBLE
