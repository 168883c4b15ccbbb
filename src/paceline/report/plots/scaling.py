"""Plots of time, speed-up and efficiency over ranks: a panel each, with a line per strategy, labelled at its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.analysis.scaling.curves import Mode, Scaling, ScalingCurve, ScalingGain, ScalingPoint
from paceline.analysis.statistics import Estimate
from paceline.formatting import FACTOR, SHARE, TIMES, Unit, tick_label, unit_for, whole
from paceline.records.experiment import Candidate
from paceline.report.figures.columns import interval_or_repeats
from paceline.report.figures.points import BASELINES, wide_interval
from paceline.report.plots.drawing import (
    LABEL_SIZE,
    LINE,
    Json,
    Panel,
    axis,
    base_layout,
    grid,
    heading,
    numbered,
    plain,
    rounded,
    short_names,
    ticks,
)
from paceline.report.plots.end_labels import AxisScale, end_label, spread_labels
from paceline.report.plots.palette import colours
from paceline.report.scaling_verdict import TITLES, format_ranks

HEIGHT, GAP_HEIGHT, TOP, BOTTOM, LEFT = 250, 74, 34, 48, 52
"""Pixels: height of a panel, gap between rows of panels, and margins."""
WIDE = 960
"""Width that panels in a row are laid out for, in pixels."""
MANY_TIMES = 6.0
"""Ratio of the slowest to the fastest time from which the axis of times is logarithmic."""
MANY_RANKS = 12
"""Ratio of the most to the fewest ranks from which the axis of ranks is logarithmic."""
LONGEST_NAME = 18
SHIFT, FURTHEST_SHIFT = 0.03, 0.045
"""Shares of the axis: shift between the points of two lines on the same ranks, and the largest shift."""

Value = Callable[[ScalingPoint], Estimate | None]


@dataclass(frozen=True)
class _Line:
    """Curve with its values and style."""

    label: str
    colour: str
    dash: str
    places: list[ScalingPoint]
    values: list[Estimate]
    unit: Unit
    scaling: Scaling
    shift: float
    """Horizontal shift of its points, as a share of the axis, so that intervals of several lines do not coincide."""

    def xs(self, across: AxisScale) -> list[float]:
        """Return the horizontal positions of its points."""
        low, high = across.ends
        return [across.value(across.place(point.ranks) + self.shift * (high - low)) for point in self.places]

    @property
    def ys(self) -> list[float]:
        return [value.value / self.unit.scale for value in self.values]


def strategy_colours(scaling: Scaling) -> dict[str, str]:
    """Return a colour per strategy, the same in all plots and tables."""
    roles = {candidate.strategy: candidate.role for candidate in scaling.record_set.candidates}
    return colours([Candidate(strategy, strategy, role=role) for strategy, role in roles.items()])


def curve_names(scaling: Scaling) -> dict[tuple[str, int | None], str]:
    """Return the labels of curves: the strategy, and the ranks per host where the experiment varies them."""
    short = short_names(list(dict.fromkeys(curve.strategy for curve in scaling.curves)), LONGEST_NAME)
    alone = {curve.strategy for curve in scaling.curves if curve.role == "baseline"}
    return {
        (curve.strategy, curve.ranks_per_host): short[curve.strategy]
        + (f", {curve.ranks_per_host}/host" if curve.ranks_per_host and curve.strategy not in alone else "")
        for curve in scaling.curves
    }


def curves_figure(scaling: Scaling, mode: Mode) -> Json | None:
    """Return the plot of strong or weak scaling; None where nothing was measured."""
    measured = [curve for curve in scaling.in_mode(mode) if any(point.row.is_measured for point in curve.points)]
    if not measured:
        return None
    ranks = sorted({point.ranks for curve in measured for point in curve.points})
    across = AxisScale(*_reach(ranks), logarithmic=ranks[-1] / ranks[0] >= MANY_RANKS)
    times = _times(scaling, measured)
    views, sets = [], [_on_panel(0, _panel_traces(times, _time_scale(times), across, ranks))]
    for key, baseline in _order(measured).items():
        gains, shares = _gains(scaling, measured, key), _shares(scaling, measured, key)
        scales = [_time_scale(times), _speed_scale(gains, ranks), _share_scale(shares)]
        number = len(sets)
        for panel, (lines, ideal) in enumerate([(gains, list(map(float, ranks))), (shares, [100.0] * len(ranks))], 1):
            drawn = _ideal(ranks, ideal, across)
            sets.append(
                _on_panel(panel, [*drawn, *_panel_traces(lines, scales[panel], across, ranks, taken=ideal[-1:])])
            )
        titles = [
            f"Time per step, {times[0].unit.name}",
            f"Speed-up over {baseline}",
            f"Efficiency over {baseline}",
        ]
        notes = ["", "" if gains else "none is claimed", _reason(measured, key) if not shares else ""]
        views.append(
            {
                "group": "",
                "label": f"Relative to {baseline}",
                "sets": [[0, "y"], [number, "y2"], [number + 1, "y3"]],
                "layout": _layout(titles, notes, scales, across, ranks, _label_px(scaling), 3),
                "medium": _layout(titles, notes, scales, across, ranks, _label_px(scaling), 1),
            }
        )
    return {
        "title": f"{TITLES[mode]}: time, speed-up and efficiency over ranks",
        "data": [],
        "sets": sets,
        "views": views,
        "layout": base_layout(0) | {"hovermode": "closest"},
    }


def _on_panel(number: int, traces: Sequence[Json]) -> list[Json]:
    """Return the traces with the horizontal axis of their panel; the view sets the vertical one."""
    return [trace | {"xaxis": numbered("x", number)} for trace in traces]


def _order(curves: Sequence[ScalingCurve]) -> dict[str, str]:
    """Return the baselines to compare with; first those for which efficiencies are claimed, `single` before itself."""
    points = [point for curve in curves for point in curve.points]
    known = {key: [gain for point in points if (gain := point.gains[key]) is not None] for key in BASELINES}
    kept = [key for key in BASELINES if known[key]] or ["over_single"]
    kept.sort(key=lambda key: not any(gain.efficiency for gain in known[key]))
    return {key: BASELINES[key].full for key in kept}


def _lines(scaling: Scaling, curves: Sequence[ScalingCurve], value: Value, unit: Unit) -> list[_Line]:
    names, tints = curve_names(scaling), strategy_colours(scaling)
    shifts = _shifts(curves)
    found = []
    for curve, shift in zip(curves, shifts, strict=True):
        known = [(point, own) for point in curve.points if (own := value(point)) is not None]
        if known:
            dash = "dot" if curve.ranks_per_host not in (None, 1) else "solid"
            label = names[curve.strategy, curve.ranks_per_host]
            points, values = [point for point, _ in known], [own for _, own in known]
            found.append(_Line(label, tints[curve.strategy], dash, points, values, unit, scaling, shift))
    return found


def _shifts(curves: Sequence[ScalingCurve]) -> list[float]:
    """Return a small horizontal shift for each curve but that of one process, which is a horizontal line."""
    moved = [number for number, curve in enumerate(curves) if curve.role != "baseline"]
    gap = min(SHIFT, 2 * FURTHEST_SHIFT / max(1, len(moved) - 1))
    places = {number: gap * (place - (len(moved) - 1) / 2) for place, number in enumerate(moved)}
    return [places.get(number, 0.0) for number in range(len(curves))]


def _times(scaling: Scaling, curves: Sequence[ScalingCurve]) -> list[_Line]:
    def time(point: ScalingPoint) -> Estimate | None:
        return point.row.step_s if point.row.is_measured else None

    values = [own.value for curve in curves for point in curve.points if (own := time(point)) is not None]
    return _lines(scaling, curves, time, unit_for(values, TIMES))


def _gains(scaling: Scaling, curves: Sequence[ScalingCurve], key: str) -> list[_Line]:
    def speed_up(point: ScalingPoint) -> Estimate | None:
        gain = point.gains[key]
        return None if gain is None else gain.speed_up

    return _lines(scaling, curves, speed_up, FACTOR)


def _shares(scaling: Scaling, curves: Sequence[ScalingCurve], key: str) -> list[_Line]:
    def efficiency(point: ScalingPoint) -> Estimate | None:
        gain = point.gains[key]
        return None if gain is None else gain.efficiency

    return _lines(scaling, curves, efficiency, SHARE)


def _reason(curves: Sequence[ScalingCurve], key: str) -> str:
    gains: list[ScalingGain | None] = [point.gains[key] for curve in curves for point in curve.points]
    return next(
        (gain.no_efficiency_reason for gain in gains if gain is not None and gain.no_efficiency_reason),
        "none is claimed",
    )


def _reach(ranks: Sequence[int]) -> tuple[float, float]:
    """Return the range of the axis of ranks, with room at the right for the lines to the labels."""
    if ranks[-1] / ranks[0] >= MANY_RANKS:
        return ranks[0] / 1.15, ranks[-1] * 1.35
    span = max(1, ranks[-1] - ranks[0])
    return ranks[0] - 0.06 * span, ranks[-1] + 0.14 * span


def _label_place(across: AxisScale) -> float:
    """Return the horizontal position at which labels begin."""
    low, high = across.ends
    return across.value(high - 0.03 * (high - low))


def _time_scale(lines: Sequence[_Line]) -> AxisScale:
    values = [value for line in lines for value in line.ys]
    tops = [_upper_end(line, place) for line in lines for place in range(len(line.ys))]
    if max(values) / min(values) >= MANY_TIMES:
        return AxisScale(min(values) / 1.25, max([*values, *tops]) * 1.15, logarithmic=True)
    return AxisScale(0.0, 1.08 * max([*values, *tops]), logarithmic=False)


def _speed_scale(lines: Sequence[_Line], ranks: Sequence[int]) -> AxisScale:
    """Return the axis of speed-ups, which always includes the ideal line."""
    tops = [_upper_end(line, place) for line in lines for place in range(len(line.ys))]
    return AxisScale(0.0, 1.06 * max([float(ranks[-1]), *tops]), logarithmic=False)


def _share_scale(lines: Sequence[_Line]) -> AxisScale:
    tops = [_upper_end(line, place) for line in lines for place in range(len(line.ys))]
    return AxisScale(0.0, max([110.0, *[1.05 * top for top in tops]]), logarithmic=False)


def _upper_end(line: _Line, place: int) -> float:
    """Return the upper end of an interval, limited so that a wide one does not flatten everything else."""
    high = line.values[place].high
    value = line.ys[place]
    return value if high is None else min(high / line.unit.scale, 1.3 * value)


def _panel_traces(
    lines: Sequence[_Line], scale: AxisScale, across: AxisScale, ranks: Sequence[int], taken: Sequence[float] = ()
) -> list[Json]:
    """Return the lines with their intervals, then their labels, which keep clear of heights that are `taken`."""
    drawn = [_line_trace(line, ranks, scale, across) for line in lines]
    places = spread_labels(
        [scale.place(line.ys[-1]) for line in lines], scale, [scale.place(own) for own in taken], height=HEIGHT
    )
    labels = [_label(line, scale.value(place), across, ranks) for line, place in zip(lines, places, strict=True)]
    return [*drawn, *labels]


def _line_trace(line: _Line, ranks: Sequence[int], scale: AxisScale, across: AxisScale) -> Json:
    """Return the trace of a line; that of one process becomes a dotted horizontal line over the whole panel."""
    level = line.places[0].candidate.role == "baseline" and len(line.places) == 1 and len(ranks) > 1
    values = line.values * (2 if level else 1)
    reach = [end * line.unit.scale for end in (scale.low, scale.high)]  # Intervals are cut off at the panel's edge.
    highs = [None if v.high is None else (min(v.high, reach[1]) - v.value) / line.unit.scale for v in values]
    lows = [None if v.low is None else (v.value - max(v.low, reach[0])) / line.unit.scale for v in values]
    oversubscribed = [bool(point.oversubscribed) for point in line.places]
    return {
        "type": "scatter",
        "mode": "lines" if level else "lines+markers",
        "x": [ranks[0], ranks[-1]] if level else rounded(line.xs(across)),
        "y": rounded(line.ys * (2 if level else 1)),
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": highs,
            "arrayminus": lows,
            "color": line.colour,
            "thickness": 1,
            "width": 3,
            "visible": not level,
        },
        "line": {"color": line.colour, "width": LINE, "dash": "dot" if level else line.dash},
        "marker": {
            "color": line.colour,
            "size": 7,
            "symbol": ["circle-open" if own else "circle" for own in oversubscribed],
        },
        "cliponaxis": False,
        "customdata": [_tooltip(line, place) for place in range(len(line.places))] * (2 if level else 1),
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _tooltip(line: _Line, place: int) -> str:
    point, value = line.places[place], line.values[place]
    unit = line.unit
    ends = wide_interval(value) or interval_or_repeats(value, unit)
    range_line = f"<br>{'both repeats' if value.each else '95% interval'}: {ends}" if ends else ""
    oversubscribed = f"<br>{plain(point.oversubscribed)}" if point.oversubscribed else ""
    what = f"{plain(point.strategy)} on {format_ranks(point, line.scaling)}, batch {whole(point.batch)}"
    return f"{what}<br>{unit.text(value.value)}{range_line}{oversubscribed}"


def _label(line: _Line, height: float, across: AxisScale, ranks: Sequence[int]) -> Json:
    """Return a curve's label, with a thin line to its end."""
    level = line.places[0].candidate.role == "baseline"
    end = ranks[-1] if level else line.xs(across)[-1]
    return end_label(line.label, line.colour, (end, line.ys[-1]), (_label_place(across), height))


def _ideal(ranks: Sequence[int], values: Sequence[float], across: AxisScale) -> list[Json]:
    """Return the line of ideal scaling and its label."""
    line = {"color": "@muted", "width": 1.2, "dash": "dash"}
    ideal = {"type": "scatter", "mode": "lines", "x": list(ranks), "y": list(values), "line": line, "hoverinfo": "skip"}
    return [ideal, end_label("ideal", "@muted", (ranks[-1], values[-1]), (_label_place(across), values[-1]))]


def _label_px(scaling: Scaling) -> int:
    return 12 + round(7.0 * max(map(len, curve_names(scaling).values())))


def _layout(
    titles: Sequence[str],
    notes: Sequence[str],
    scales: Sequence[AxisScale],
    across: AxisScale,
    ranks: Sequence[int],
    label_px: int,
    columns: int,
) -> Json:
    """Return a layout with `columns` panels in a row."""
    lines = math.ceil(len(titles) / columns)
    inside = lines * HEIGHT + (lines - 1) * GAP_HEIGHT
    gap_x = (label_px + LEFT) / (WIDE - LEFT - label_px) if columns > 1 else 0.0
    panels = grid(len(titles), columns, gap_x=gap_x, gap_y=GAP_HEIGHT / inside)
    layout: Json = {
        "height": inside + TOP + BOTTOM,
        "margin": {"l": LEFT, "r": label_px, "t": TOP, "b": BOTTOM},
        "annotations": [
            *[heading(plain(title), panel) for title, panel in zip(titles, panels, strict=True)],
            *[_note(note, panel) for note, panel in zip(notes, panels, strict=True) if note],
        ],
    }
    for number, (panel, scale) in enumerate(zip(panels, scales, strict=True)):
        layout[numbered("xaxis", number)] = axis(
            "ranks",
            domain=panel.x,
            anchor=numbered("y", number),
            showgrid=False,
            type="log" if across.logarithmic else "linear",
            range=across.ends,
            tickvals=list(ranks),
            ticktext=[str(rank) for rank in ranks],
        )
        layout[numbered("yaxis", number)] = _vertical(scale, share=number == len(panels) - 1) | {
            "domain": panel.y,
            "anchor": numbered("x", number),
        }
    return layout


def _vertical(scale: AxisScale, *, share: bool) -> Json:
    if scale.logarithmic:
        marks = ticks(scale.low, scale.high)
        return axis(type="log", range=scale.ends, tickvals=marks, ticktext=[tick_label(mark) for mark in marks])
    return axis(range=scale.ends, nticks=6, **({"ticksuffix": "%"} if share else {}))


def _note(text: str, panel: Panel) -> Json:
    """Return a note in the middle of a panel without curves."""
    middle: Json = {"x": sum(panel.x) / 2, "y": sum(panel.y) / 2}
    lines = plain(text).replace(", ", ",<br>")
    return (
        heading(lines, panel, raised=0)
        | middle
        | {
            "xanchor": "center",
            "yanchor": "middle",
            "font": {"size": LABEL_SIZE, "color": "@muted"},
        }
    )
