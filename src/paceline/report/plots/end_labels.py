"""Labels at the ends of curves: spaced so that they do not overlap, each with a thin line to its curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.report.plots.drawing import LABEL_SIZE, Json, plain, rounded

LABEL_HEIGHT = 16
"""Pixels."""


@dataclass(frozen=True)
class AxisScale:
    """Range of an axis, linear or logarithmic."""

    low: float
    high: float
    logarithmic: bool

    def place(self, value: float) -> float:
        """Return the position of a value in plotly's axis coordinates."""
        return math.log10(value) if self.logarithmic else value

    def value(self, place: float) -> float:
        """Return the value at a position."""
        return 10**place if self.logarithmic else place

    @property
    def ends(self) -> list[float]:
        """Both ends, in plotly's axis coordinates."""
        return [self.place(self.low), self.place(self.high)]


def end_label(text: str, colour: str, end: tuple[float, float], place: tuple[float, float]) -> Json:
    """Return a trace with a label at `place` and a line to it from the `end` of its curve."""
    return {
        "type": "scatter",
        "mode": "lines+text",
        "x": rounded([end[0], place[0]]),
        "y": rounded([end[1], place[1]]),
        "text": ["", f" {plain(text)}"],
        "textposition": "middle right",
        "textfont": {"color": "@ink", "size": LABEL_SIZE},
        "line": {"color": colour, "width": 0.8},
        "cliponaxis": False,
        "hoverinfo": "skip",
    }


def spread_labels(wanted: Sequence[float], scale: AxisScale, taken: Sequence[float], *, height: int) -> list[float]:
    """Return positions for labels in a panel of `height` pixels, near `wanted`, at least one label height apart.

    Labels keep the order of their curves' ends, and keep clear of positions that are `taken`.
    """
    low, high = scale.ends
    gap = LABEL_HEIGHT / height * (high - low)
    fixed = {-1 - number: place for number, place in enumerate(taken)}
    order = sorted([*fixed, *range(len(wanted))], key=lambda n: (fixed[n] if n in fixed else wanted[n], n >= 0))
    places = [fixed[n] if n in fixed else wanted[n] for n in order]
    for number in range(1, len(places)):  # Move labels up first, then back down from the top of the panel.
        places[number] = max(places[number], places[number - 1] + gap)
    top = max(high - 0.02 * (high - low), *taken, low)  # Plotly hides text beyond the end of an axis.
    for number in range(len(places) - 1, -1, -1):
        bound = top if number == len(places) - 1 else places[number + 1] - gap
        own = order[number]
        places[number] = fixed[own] if own in fixed else min(places[number], bound)
    by_curve = dict(zip(order, places, strict=True))
    return [by_curve[number] for number in range(len(wanted))]
