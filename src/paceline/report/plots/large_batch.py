"""Plot of an experiment with large batches: test accuracy and training loss of each candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.large_batch.results import LargeBatches, LargeBatchRow
from paceline.analysis.statistics import Estimate
from paceline.formatting import ACCURACY, LOSS, Unit, interval, whole
from paceline.report.large_batch_verdict import row_name, row_outcome
from paceline.report.plots.drawing import Json, Panel, axis, base_layout, grid, loss_axis, plain, rounded, shortened
from paceline.report.plots.palette import colours

ROW_HEIGHT = 24
GAP = 0.7
"""Room between two batches, in rows."""
EDGES = 96
"""Height of the axis and the margins, in pixels."""
CHARACTER = 7.2
"""Width of a character of a label, in pixels."""
LONGEST_NARROW = 16
ALONE = grid(1, 1, gap_x=0, gap_y=0)
BESIDE = [Panel((0, 0.56), (0, 1)), Panel((0.62, 1), (0, 1))]
BELOW = grid(2, 1, gap_x=0, gap_y=0.18)
"""Panels of accuracies and of losses: one, both in a row, and both in a column on a narrow screen."""


@dataclass(frozen=True)
class _Place:
    """Candidate with its place on the vertical axis, counted downwards."""

    row: LargeBatchRow
    y: float


def large_batch_figure(found: LargeBatches) -> Json | None:
    """Return the plot; None if nothing was tested."""
    places = _places(found)
    if all(place.row.accuracy is None for place in places):
        return None
    tints = colours(found.record_set.candidates)
    losses = any(place.row.end_loss is not None for place in places)
    data = [
        *_panel(found, places, tints, "test_accuracy", ""),
        *(_panel(found, places, tints, "end_loss", "2") if losses else []),
        *_outcomes(places),
    ]
    labels = [f"{whole(place.row.batch)} {row_name(place.row)}" for place in places]
    height = EDGES + round(ROW_HEIGHT * (places[-1].y + 1))
    return {
        "title": "Test accuracy and training loss by batch and remedies",
        "data": data,
        "layout": _layout(places, labels, height, BESIDE if losses else ALONE),
        "narrow": _layout(
            places, [shortened(label, LONGEST_NARROW) for label in labels], height, BELOW if losses else ALONE
        ),
    }


def _places(found: LargeBatches) -> list[_Place]:
    places, y = [_Place(found.reference, 0.0)], 0.0
    for rows in found.by_size.values():
        y += GAP
        for row in rows:
            y += 1
            places.append(_Place(row, y))
    return places


def _panel(found: LargeBatches, places: Sequence[_Place], tints: dict[str, str], key: str, number: str) -> list[Json]:
    """Return a line at the reference, and a point with its interval for each candidate."""
    is_share = key == "test_accuracy"
    scale, unit = (100, ACCURACY) if is_share else (1, LOSS)
    known = [(place, own) for place in places if (own := _estimate(place.row, key)) is not None]
    reference = _estimate(found.reference, key)
    line: list[Json] = []
    if reference is not None:
        line = [
            {
                "type": "scatter",
                "mode": "lines",
                "x": [scale * reference.value] * 2,
                "y": [-0.6, places[-1].y + 0.6],
                "line": {"color": "@muted", "width": 1, "dash": "dash"},
                "hoverinfo": "skip",
            }
        ]
    points: Json = {
        "type": "scatter",
        "mode": "markers",
        "x": rounded(scale * own.value for _, own in known),
        "y": [place.y for place, _ in known],
        "text": [plain(_tooltip(place.row, own, unit)) for place, own in known],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": rounded(scale * ((own.high or own.value) - own.value) for _, own in known),
            "arrayminus": rounded(scale * (own.value - _low(own)) for _, own in known),
            "color": "@muted",
            "thickness": 1,
            "width": 0,
        },
        "marker": {
            "color": [tints[place.row.row.candidate.name] for place, _ in known],
            "size": 10,
            "symbol": ["diamond" if place.row.is_reference else "circle" for place, _ in known],
        },
        "cliponaxis": False,
        "hovertemplate": "%{text}<extra></extra>",
    }
    axes = {"xaxis": f"x{number}", "yaxis": f"y{number}"} if number else {}
    return [own | axes for own in (*line, points)]


def _outcomes(places: Sequence[_Place]) -> list[Json]:
    """Return the remark of each candidate without a result, in place of its point."""
    failed = [place for place in places if place.row.accuracy is None and row_outcome(place.row)]
    if not failed:
        return []
    return [
        {
            "type": "scatter",
            "mode": "text",
            "x": [0] * len(failed),
            "y": [place.y for place in failed],
            "text": [row_outcome(place.row) for place in failed],
            "textposition": "middle right",
            "textfont": {"color": "@muted"},
            "hoverinfo": "skip",
        }
    ]


def _layout(places: Sequence[_Place], labels: Sequence[str], height: int, panels: Sequence[Panel]) -> Json:
    left = 12 + round(CHARACTER * max(map(len, labels)))
    rows: Json = {"range": [places[-1].y + 0.7, -0.7], "showgrid": False}
    named: Json = {"tickvals": [place.y for place in places], "ticktext": [plain(label) for label in labels]}
    accuracies, *losses = panels
    is_below = bool(losses) and losses[0].x == accuracies.x
    layout = base_layout(2 * height if is_below else height, left=left) | {
        "hovermode": "closest",
        "xaxis": axis("test accuracy, %", domain=list(accuracies.x), anchor="y", range=[-2, 102], nticks=6),
        "yaxis": axis(domain=list(accuracies.y), **rows, **named),
    }
    for panel in losses:
        title = "training loss, last epoch"
        values = [place.row.end_loss.value for place in places if place.row.end_loss is not None]
        layout["xaxis2"] = loss_axis(title, values, 5, domain=list(panel.x), anchor="y2", rangemode="tozero")
        layout["yaxis2"] = axis(
            domain=list(panel.y), anchor="x2", **rows, **(named if is_below else {"showticklabels": False})
        )
    return layout


def _estimate(row: LargeBatchRow, key: str) -> Estimate | None:
    return row.row.test_accuracy if key == "test_accuracy" else row.end_loss


def _low(own: Estimate) -> float:
    return own.value if own.low is None else own.low


def _tooltip(row: LargeBatchRow, own: Estimate, unit: Unit) -> str:
    ends = interval(own.low, own.high, unit)
    outcome = row_outcome(row)
    return (
        f"{whole(row.batch)} {row_name(row)}: {unit.text(own.value)}"
        + (f" ({ends})" if ends else "")
        + (f", {outcome}" if outcome else "")
    )
