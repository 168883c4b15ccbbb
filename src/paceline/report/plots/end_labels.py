"""Names behind the ends of curves: a label's height apart, with a thin line between an end and its name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.report.plots.drawing import LABEL_SIZE, Json, plain, rounded

LABEL_HEIGHT = 16
"""In pixels."""


@dataclass(frozen=True)
class AxisScale:
    """An axis: from where to where, and how far a value is up, in its own terms."""

    low: float
    high: float
    logarithmic: bool

    def place(self, value: float) -> float:
        """Where a value is, as plotly counts on this axis."""
        return math.log10(value) if self.logarithmic else value

    def value(self, place: float) -> float:
        """And back."""
        return 10**place if self.logarithmic else place

    @property
    def ends(self) -> list[float]:
        """Both ends, as plotly counts."""
        return [self.place(self.low), self.place(self.high)]


def named_end(text: str, colour: str, end: tuple[float, float], place: tuple[float, float]) -> Json:
    """A name at a place, and a line to it from the end that it is of."""
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


def apart(wanted: Sequence[float], scale: AxisScale, taken: Sequence[float], *, height: int) -> list[float]:
    """Places for labels in a panel of some height, close to those wanted, that are a label's height apart.

    They keep the order of the ends that they are of, and away from places that are `taken`.
    """
    low, high = scale.ends
    gap = LABEL_HEIGHT / height * (high - low)
    fixed = {-1 - number: place for number, place in enumerate(taken)}
    order = sorted([*fixed, *range(len(wanted))], key=lambda n: (fixed[n] if n in fixed else wanted[n], n >= 0))
    places = [fixed[n] if n in fixed else wanted[n] for n in order]
    for number in range(1, len(places)):  # Upwards first, then back down from where the panel ends.
        places[number] = max(places[number], places[number - 1] + gap)
    top = max(high - 0.02 * (high - low), *taken, low)  # Beyond the end of an axis plotly shows nothing.
    for number in range(len(places) - 1, -1, -1):
        bound = top if number == len(places) - 1 else places[number + 1] - gap
        own = order[number]
        places[number] = fixed[own] if own in fixed else min(places[number], bound)
    by_curve = dict(zip(order, places, strict=True))
    return [by_curve[number] for number in range(len(wanted))]
