"""Building blocks of all plots: escaped text, plain axes, panels in a grid.

Plots are dictionaries in plotly's format. Colours that depend on the theme are written as tokens, which the page
replaces: `@ink` for text, `@muted` for secondary text, `@grid` for lines, `@paper` for the background.
"""

from __future__ import annotations

import html
import itertools
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from paceline.formatting import Unit, significant, tick_label

Json = dict[str, Any]

LABEL_SIZE = 12
TITLE_SIZE = 13
LONGEST_LABEL = 30
LEAST_OF_NAME = 4
"""Characters of a strategy's name that stay before its options are shortened."""
LINE = 1.8
MOST_POINTS = 600
LEAST_POINTS = 40
"""Points of one curve: more are not visible, fewer do not make a curve."""
FLATTENING = 20
"""Ratio of the largest loss to the median, or of the peaks of learning rates, from which an axis is logarithmic."""


def plain(text: str) -> str:
    """Escape text for plotly, which interprets some HTML and replaces `%{...}`."""
    return html.escape(text, quote=False).replace("%{", "%&#123;")


def short_names(names: Sequence[str], most: int = LONGEST_LABEL) -> dict[str, str]:
    """Return distinct labels of at most `most` characters, by name.

    Long names lose the parts that all of them have, then their middle.
    """
    long = [re.split(r"[ ,]", name) for name in names if len(name) > most]
    common = set.intersection(*map(set, long)) if len(long) > 1 else set()
    found: dict[str, str] = {}
    for name in names:
        own = [part for part in re.split(r"[ ,]", name) if part not in common]
        short = shortened(" ".join(own) if len(name) > most and own else name, most)
        number = f" ({len(found) + 1})" if short in found.values() else ""
        found[name] = shortened(short, most - len(number)) + number
    return found


def shortened(name: str, most: int = LONGEST_LABEL) -> str:
    """Return a name of at most `most` characters.

    Options that are on lose their value, then the strategy loses its end, then the whole name loses its middle:
    strategies differ at the start, settings at the end.
    """
    name = name if len(name) <= most else name.replace("=true", "")
    if len(name) <= most:
        return name
    strategy, colon, options = name.partition(":")
    room = most - len(f"…:{options}")
    if colon and room >= LEAST_OF_NAME:
        return f"{strategy[:room]}…:{options}"
    return f"{name[: most // 2]}…{name[-(most - most // 2 - 1) :]}"


def hover_value(variable: str, unit: Unit) -> str:
    """Return the part of a tooltip's template that shows a variable of the trace, which is in `unit`."""
    return f"%{{{variable}:{unit.plotly_format}}}{unit.ending}"


class Panel(NamedTuple):
    """Area of one pair of axes, as shares of the plot."""

    x: tuple[float, float]
    y: tuple[float, float]


def grid(count: int, columns: int, *, gap_x: float, gap_y: float) -> list[Panel]:
    """Return panels of equal size in reading order."""
    rows = math.ceil(count / columns)
    width = (1 - gap_x * (columns - 1)) / columns
    height = (1 - gap_y * (rows - 1)) / rows
    places = itertools.islice(itertools.product(range(rows), range(columns)), count)
    return [
        Panel(
            (column * (width + gap_x), column * (width + gap_x) + width),
            (1 - row * (height + gap_y) - height, 1 - row * (height + gap_y)),
        )
        for row, column in places
    ]


def base_layout(height: int, *, left: int = 56, right: int = 16, top: int = 16, bottom: int = 44) -> Json:
    """Return a layout without decoration."""
    return {
        "height": height,
        "autosize": True,
        "margin": {"l": left, "r": right, "t": top, "b": bottom},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": LABEL_SIZE, "color": "@muted"},
        "showlegend": False,
        "hoverlabel": {"bgcolor": "@paper", "bordercolor": "@grid", "font": {"color": "@ink", "size": LABEL_SIZE}},
        "dragmode": False,
    }


def axis(title: str | None = None, **extra: Any) -> Json:
    """Return an axis with faint grid lines and no other decoration."""
    settings: Json = {
        "gridcolor": "@grid",
        "gridwidth": 1,
        "zeroline": False,
        "showline": False,
        "ticks": "",
        "fixedrange": True,
        "automargin": False,
    }
    if title is not None:
        settings["title"] = {"text": title, "standoff": 10, "font": {"size": LABEL_SIZE, "color": "@muted"}}
    return settings | extra


def loss_axis(title: str, losses: Sequence[float], nticks: int = 6, **extra: Any) -> Json:
    """Return an axis of losses: logarithmic where a few, of runs that diverged, would flatten all others."""
    values = finite(losses)
    if not values or min(values) <= 0 or max(values) <= FLATTENING * statistics.median(values):
        return axis(title, nticks=nticks, **extra)
    marks = ticks(min(values) / 1.1, max(values) * 1.1)
    labels = [tick_label(mark) for mark in marks]
    return axis(title, type="log", tickvals=marks, ticktext=labels, **extra | {"rangemode": "normal"})


def heading(text: str, panel: Panel, *, raised: int = 8) -> Json:
    """Return a panel's title, above its left end."""
    return {
        "text": text,
        "x": panel.x[0],
        "y": panel.y[1],
        "xref": "paper",
        "yref": "paper",
        "xanchor": "left",
        "yanchor": "bottom",
        "yshift": raised,
        "showarrow": False,
        "font": {"size": TITLE_SIZE, "color": "@ink"},
    }


def side_note(text: str, panel: Panel, *, raised: int = 8) -> Json:
    """Return secondary text above a panel's right end."""
    lesser = {"x": panel.x[1], "xanchor": "right", "font": {"size": LABEL_SIZE, "color": "@muted"}}
    return heading(text, panel, raised=raised) | lesser


def numbered(name: str, number: int) -> str:
    """Return plotly's name of the nth axis: x, x2, x3, and so on."""
    return name if number == 0 else f"{name}{number + 1}"


def rank_line(place: int, rank: int, colour: str, **trace: Any) -> Json:
    """Return the line of a rank; all but the first are dotted, so that it stays visible below them."""
    line = {"color": colour, "width": 1.3, "simplify": False, "dash": "dot" if place else "solid"}
    return {
        "type": "scatter",
        "mode": "lines",
        "meta": f"rank {rank}",
        "opacity": 1 if place == 0 else 0.6,
        **trace,
        "line": line | trace.get("line", {}),
    }


def decades(low: float, high: float) -> list[float]:
    """Return round values from `low` to `high` for a logarithmic axis: 1, 2, 5 in each decade, or the decades alone."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [digit * 10.0**exponent for exponent in exponents for digit in (1, 2, 5)]
    inside = [value for value in fine if low <= value <= high]
    if len(inside) <= 7:
        return inside
    stride = math.ceil(len(exponents) / 7)
    return [10.0**exponent for exponent in exponents if exponent % stride == 0 and low <= 10.0**exponent <= high]


def ticks(low: float, high: float) -> list[float]:
    """Return round values for a logarithmic axis, a few even for a short one."""
    if high / low > 8:
        return decades(low, high)
    step = 10.0 ** math.floor(math.log10(high - low))
    step *= next((part for part in (1, 0.5, 0.2) if (high - low) / (step * part) >= 3), 0.1)
    return [significant(step * n, 6) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def whole_ticks(steps: int) -> dict[str, int]:
    """Return the axis setting for ticks at whole steps, where plotly would also mark halves."""
    return {"dtick": 1} if steps <= 10 else {}


def points_per_curve(points: int, curves: int) -> int:
    """Return the number of points per curve that keeps the page small."""
    return max(LEAST_POINTS, min(MOST_POINTS, points // max(1, curves)))


def rounded(values: Iterable[float], digits: int = 5) -> list[float | None]:
    """Return values with a few significant digits, as many as a plot can show; None for values that are not finite."""
    return [significant(value, digits) if math.isfinite(value) else None for value in values]


def finite(values: Sequence[float]) -> list[float]:
    """Return the finite values."""
    return [value for value in values if math.isfinite(value)]
