"""Plots of time, speed-up and efficiency over ranks: a panel each, with a line per strategy, labelled at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.analysis.scaling.curves import Mode, Scaling, ScalingCurve, ScalingGain, ScalingPoint
from paceline.analysis.statistics import Estimate
from paceline.formatting import FACTOR, SHARE, TIMES, Unit, unit_for, whole
from paceline.records.experiment.design import Candidate
from paceline.report.figures.points import BASELINES
from paceline.report.plots.drawing import Json, base_layout, short_names
from paceline.report.plots.end_labels import AxisScale, end_label
from paceline.report.plots.line_panels import (
    PanelAxis,
    PanelLine,
    label_place,
    label_px,
    line_shifts,
    on_panel,
    panel_layout,
    panel_traces,
    upper_end,
    value_scale,
)
from paceline.report.plots.palette import colours
from paceline.report.scaling_verdict import TITLES, format_ranks

MANY_RANKS = 12
"""Ratio of the most to the fewest ranks from which the axis of ranks is logarithmic."""
LONGEST_NAME = 18
Value = Callable[[ScalingPoint], Estimate | None]


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
    views, sets = [], [on_panel(0, panel_traces(times, value_scale(times), across, ranks))]
    for key, baseline in _order(measured).items():
        gains, shares = _gains(scaling, measured, key), _shares(scaling, measured, key)
        scales = [value_scale(times), _speed_scale(gains, ranks), _share_scale(shares)]
        number = len(sets)
        for panel, (lines, ideal) in enumerate([(gains, list(map(float, ranks))), (shares, [100.0] * len(ranks))], 1):
            drawn = _ideal(ranks, ideal, across)
            sets.append(on_panel(panel, [*drawn, *panel_traces(lines, scales[panel], across, ranks, taken=ideal[-1:])]))
        panels = [
            PanelAxis(f"Time per step, {times[0].unit.name}", scales[0]),
            PanelAxis(f"Speed-up over {baseline}", scales[1], "" if gains else "none is claimed"),
            PanelAxis(
                f"Efficiency over {baseline}", scales[2], _reason(measured, key) if not shares else "", is_share=True
            ),
        ]
        room = label_px(list(curve_names(scaling).values()))
        views.append(
            {
                "group": "",
                "label": f"Relative to {baseline}",
                "sets": [[0, "y"], [number, "y2"], [number + 1, "y3"]],
                "layout": panel_layout(panels, across, "ranks", ranks, room, 3),
                "medium": panel_layout(panels, across, "ranks", ranks, room, 1),
            }
        )
    return {
        "title": f"{TITLES[mode]}: time, speed-up and efficiency over ranks",
        "data": [],
        "sets": sets,
        "views": views,
        "layout": base_layout(0) | {"hovermode": "closest"},
    }


def _order(curves: Sequence[ScalingCurve]) -> dict[str, str]:
    """Return the baselines to compare with; first those for which efficiencies are claimed, `single` before itself."""
    points = [point for curve in curves for point in curve.points]
    known = {key: [gain for point in points if (gain := point.gains[key]) is not None] for key in BASELINES}
    kept = [key for key in BASELINES if known[key]] or ["over_single"]
    kept.sort(key=lambda key: not any(gain.efficiency for gain in known[key]))
    return {key: BASELINES[key].full for key in kept}


def _lines(scaling: Scaling, curves: Sequence[ScalingCurve], value: Value, unit: Unit) -> list[PanelLine]:
    names, tints = curve_names(scaling), strategy_colours(scaling)
    shifts = line_shifts([curve.role != "baseline" for curve in curves])  # That of one process is a horizontal line.
    found = []
    for curve, shift in zip(curves, shifts, strict=True):
        known = [(point, own) for point in curve.points if (own := value(point)) is not None]
        if known:
            found.append(
                PanelLine(
                    label=names[curve.strategy, curve.ranks_per_host],
                    colour=tints[curve.strategy],
                    dash="dot" if curve.ranks_per_host not in (None, 1) else "solid",
                    places=[point.ranks for point, _ in known],
                    values=[own for _, own in known],
                    unit=unit,
                    names=[_name(scaling, point) for point, _ in known],
                    remarks=[point.oversubscribed for point, _ in known],
                    is_level=curve.role == "baseline",
                    shift=shift,
                )
            )
    return found


def _name(scaling: Scaling, point: ScalingPoint) -> str:
    return f"{point.strategy} on {format_ranks(point, scaling)}, batch {whole(point.batch)}"


def _times(scaling: Scaling, curves: Sequence[ScalingCurve]) -> list[PanelLine]:
    def time(point: ScalingPoint) -> Estimate | None:
        return point.row.step_s if point.row.is_measured else None

    values = [own.value for curve in curves for point in curve.points if (own := time(point)) is not None]
    return _lines(scaling, curves, time, unit_for(values, TIMES))


def _gains(scaling: Scaling, curves: Sequence[ScalingCurve], key: str) -> list[PanelLine]:
    def speed_up(point: ScalingPoint) -> Estimate | None:
        gain = point.gains[key]
        return None if gain is None else gain.speed_up

    return _lines(scaling, curves, speed_up, FACTOR)


def _shares(scaling: Scaling, curves: Sequence[ScalingCurve], key: str) -> list[PanelLine]:
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


def _speed_scale(lines: Sequence[PanelLine], ranks: Sequence[int]) -> AxisScale:
    """Return the axis of speed-ups, which always includes the ideal line."""
    tops = [upper_end(line, place) for line in lines for place in range(len(line.ys))]
    return AxisScale(0.0, 1.06 * max([float(ranks[-1]), *tops]), logarithmic=False)


def _share_scale(lines: Sequence[PanelLine]) -> AxisScale:
    tops = [upper_end(line, place) for line in lines for place in range(len(line.ys))]
    return AxisScale(0.0, max([110.0, *[1.05 * top for top in tops]]), logarithmic=False)


def _ideal(ranks: Sequence[int], values: Sequence[float], across: AxisScale) -> list[Json]:
    """Return the line of ideal scaling and its label."""
    line = {"color": "@muted", "width": 1.2, "dash": "dash"}
    ideal = {"type": "scatter", "mode": "lines", "x": list(ranks), "y": list(values), "line": line, "hoverinfo": "skip"}
    return [ideal, end_label("ideal", "@muted", (ranks[-1], values[-1]), (label_place(across), values[-1]))]
