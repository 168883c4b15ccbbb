"""Plot of a race: the test accuracy of every run over its training time, with the target."""

from __future__ import annotations

from paceline.analysis.race.race import Race
from paceline.analysis.race.runs import RaceRun
from paceline.formatting import SHORT_IN_PLOTLY, TIMES
from paceline.report.plots.drawing import LABEL_SIZE, LINE, Json, axis, base_layout, hover_value, plain, rounded
from paceline.report.plots.palette import colours
from paceline.report.race_verdict import format_accuracy, format_outcome

FADED = 0.55


def race_figure(race: Race) -> Json | None:
    """Return the plot; None if no run was tested."""
    runs = [run for run in race.runs if any(point.accuracy is not None for point in run.curve)]
    if not runs:
        return None
    (colour,) = list(colours(race.record_set.candidates).values())[:1]
    end_s = max(run.curve[-1].train_s for run in runs)
    layout = base_layout(380, left=64) | {
        "hovermode": "closest",
        "xaxis": axis("training time, s", showgrid=False, rangemode="tozero"),
        "yaxis": axis("test accuracy, %", nticks=7),
    }
    return {
        "title": "Test accuracy of every run over training time",
        "data": [_target(race, end_s), *[_curve(run, colour) for run in runs], *_ends(runs, colour)],
        "layout": layout,
        "narrow": layout | {"height": 320, "margin": {"l": 48, "r": 8, "t": 12, "b": 44}},
    }


def _target(race: Race, end_s: float) -> Json:
    target = race.design.target_accuracy
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [0, *rounded([end_s])],
        "y": [100 * target] * 2,
        "line": {"color": "@muted", "width": 1, "dash": "dash"},
        "hovertemplate": f"target {format_accuracy(target)}<extra></extra>",
    }


def _curve(run: RaceRun, colour: str) -> Json:
    known = [point for point in run.curve if point.accuracy is not None]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": rounded(point.train_s for point in known),
        "y": rounded(100 * (point.accuracy or 0) for point in known),
        "meta": plain(f"run {run.number}, seed {run.seed}"),
        "opacity": 1 if run.outcome == "reached" else FADED,
        "line": {"color": colour, "width": LINE, "dash": "solid" if run.outcome == "reached" else "dot"},
        "marker": {"color": colour, "size": 4},
        "hovertemplate": f"%{{meta}}: accuracy %{{y:{SHORT_IN_PLOTLY}}}% after {hover_value('x', TIMES.base)}"
        "<extra></extra>",
    }


def _ends(runs: list[RaceRun], colour: str) -> list[Json]:
    """Return marks at the ends of the curves: a disc where the target was reached, a cross where it was missed."""
    found: list[Json] = []
    for reached, symbol, size in ((True, "circle", 10), (False, "x", 10)):
        own = [run for run in runs if (run.outcome == "reached") is reached]
        if own:
            ends = [run.curve[-1] for run in own]
            found.append(
                {
                    "type": "scatter",
                    "mode": "markers+text",
                    "x": rounded(point.train_s for point in ends),
                    "y": rounded(100 * (point.accuracy or 0) for point in ends),
                    "text": [str(run.number) for run in own],
                    "textposition": "top center",
                    "textfont": {"color": "@ink", "size": LABEL_SIZE},
                    "cliponaxis": False,
                    "customdata": [
                        plain(f"run {run.number}: {format_outcome(run) or 'target reached'}") for run in own
                    ],
                    "marker": {"color": colour, "size": size, "symbol": symbol},
                    "hovertemplate": "%{customdata}<extra></extra>",
                }
            )
    return found
