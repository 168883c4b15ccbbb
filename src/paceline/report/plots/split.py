"""Plot of the time split as stacked bars: the mean of every candidate, or each of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.analysis.steps.split import PARTS
from paceline.formatting import TIMES, Unit, percent, seconds, unit_for
from paceline.records.summary import Split
from paceline.report.plots.drawing import (
    LABEL_SIZE,
    LONGEST_LABEL,
    Json,
    axis,
    base_layout,
    plain,
    rounded,
    short_names,
)
from paceline.report.plots.palette import PARTS as COLOURS

NAMES = {
    "compute": "compute",
    "overlapped": "overlapped communication",
    "exposed": "exposed communication",
    "other": "other",
}
BAR_HEIGHT, TOP, BOTTOM = 34, 8, 44
RANK_HEIGHT = 24
GAP = 0.6
"""Space between the ranks of two candidates, in bars."""
NARROW_LABEL = 18
"""Longest name on a narrow screen, in characters."""
LABEL_ROOM, NARROW_LABEL_ROOM = 1.12, 1.3
"""Axis length ÷ longest bar, so that the number after the bar fits."""


@dataclass(frozen=True)
class StackedBar:
    """One stacked bar: its label, its name in the tooltip, its vertical place, and the time split."""

    label: str
    about: str
    place: float
    split: Split


def split(comparison: Comparison) -> Json | None:
    """Return the plot; None where no events were recorded."""
    rows = [row for row in comparison.rows if row.split is not None]
    if not rows:
        return None
    wide, narrow = (short_names([row.candidate.name for row in rows], most) for most in (LONGEST_LABEL, NARROW_LABEL))
    views = [("On average", _means, BAR_HEIGHT), ("By rank", _ranks, RANK_HEIGHT)]
    unit = unit_for([row.split.mean.step_s for row in rows if row.split is not None], TIMES)
    return {
        "title": "Time split of a step",
        "data": [],
        "sets": [bar_traces(bars(rows, wide), unit) for _, bars, _ in views],
        "views": [
            {
                "group": "",
                "label": label,
                "sets": [[number, "y"]],
                "layout": bar_layout(bars(rows, wide), unit, height, LABEL_ROOM),
                "narrow": bar_layout(bars(rows, narrow), unit, height, NARROW_LABEL_ROOM),
            }
            for number, (label, bars, height) in enumerate(views)
        ],
        "layout": base_layout(0, left=0, right=8, top=TOP, bottom=BOTTOM)
        | {"barmode": "stack", "bargap": 0.3, "uniformtext": {"minsize": 10, "mode": "hide"}},
        "keys": [{"label": NAMES[part], "colour": COLOURS[part], "hollow": False} for part in PARTS],
    }


def _means(rows: Sequence[CandidateRow], names: dict[str, str]) -> list[StackedBar]:
    return [
        StackedBar(names[row.candidate.name], row.candidate.name, place, row.split.mean)
        for place, row in enumerate(rows)
        if row.split is not None
    ]


def _ranks(rows: Sequence[CandidateRow], names: dict[str, str]) -> list[StackedBar]:
    """Return a bar per rank; the label of a candidate's first bar includes its name."""
    bars: list[StackedBar] = []
    place = 0.0
    for row in rows:
        assert row.split is not None
        for number, (rank, own) in enumerate(row.split.ranks.items()):
            name = row.candidate.name
            label = f"{names[name]}  {rank}" if number == 0 else str(rank)
            bars.append(StackedBar(label, f"{name}, rank {rank}", place, own))
            place += 1
        place += GAP
    return bars


def bar_traces(bars: Sequence[StackedBar], unit: Unit, whole: str = "step") -> list[Json]:
    """Return a trace per part, and the time of the whole step, or of another `whole`, after the bars."""
    traces: list[Json] = []
    for part in PARTS:
        values = [float(getattr(bar.split, f"{part}_s")) for bar in bars]
        shares = [bar.split.share(part) for bar in bars]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "x": rounded(value / unit.scale for value in values),
                "y": [bar.place for bar in bars],
                "marker": {"color": COLOURS[part], "line": {"width": 0}},
                "text": [percent(share, 0) for share in shares],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "textfont": {"color": "#ffffff", "size": 11},
                "meta": NAMES[part],
                "customdata": [
                    [plain(bar.about), seconds(value), percent(share), _detail(part, bar.split)]
                    for bar, value, share in zip(bars, values, shares, strict=True)
                ],
                "hovertemplate": "%{customdata[0]}<br>%{meta}: %{customdata[1]}, %{customdata[2]} of the "
                f"{whole}%{{customdata[3]}}<extra></extra>",
            }
        )
    return [*traces, _totals(bars, unit)]


def _detail(part: str, own: Split) -> str:
    """Return more detail on a part for the tooltip."""
    if part == "compute" and own.descheduled_s is not None:
        return f"<br>descheduled during all computing: {seconds(own.descheduled_s)}"
    if part == "overlapped" and own.overlap is not None:
        return f"<br>{percent(own.overlap)} of all communication is overlapped"
    return f"<br>{seconds(own.data_s)} of it loading the batch" if part == "other" else ""


def _totals(bars: Sequence[StackedBar], unit: Unit) -> Json:
    return {
        "type": "scatter",
        "mode": "text",
        "x": rounded(bar.split.step_s / unit.scale for bar in bars),
        "y": [bar.place for bar in bars],
        "text": [f"  {unit.write(bar.split.step_s)}" for bar in bars],
        "textposition": "middle right",
        "textfont": {"color": "@ink", "size": LABEL_SIZE},
        "cliponaxis": False,
        "hoverinfo": "skip",
    }


def bar_layout(bars: Sequence[StackedBar], unit: Unit, height: int, label_room: float, whole: str = "step") -> Json:
    """Return a layout with room for bars of a height, their labels, and the numbers after them.

    `whole` is what a bar is the time of.
    """
    last = bars[-1].place
    longest = max(bar.split.step_s for bar in bars) / unit.scale
    return {
        "height": round(height * (last + 1)) + TOP + BOTTOM,
        "margin": {"l": 22 + round(7.2 * max(len(bar.label) for bar in bars)), "r": 8, "t": TOP, "b": BOTTOM},
        "xaxis": axis(f"{unit.name} per {whole}", range=[0, label_room * longest], nticks=8),
        "yaxis": axis(
            range=[last + 0.5, -0.5],
            showgrid=False,
            tickvals=[bar.place for bar in bars],
            ticktext=[f"{plain(bar.label)}  " for bar in bars],
            tickfont={"color": "@ink", "size": LABEL_SIZE},
        ),
    }
