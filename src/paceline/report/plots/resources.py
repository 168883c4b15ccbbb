"""Plot of CPU and memory of every rank in the first repeat: two panels per candidate, with events marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.analysis.curves import thinned
from paceline.analysis.resources import cpu_shares, host_usage, usage
from paceline.config.whole_number import whole_number
from paceline.formatting import SHARE, SIZES, TENTHS, Unit, percent, seconds, unit_for
from paceline.records import RunRecord
from paceline.records.schema import MarkRow
from paceline.report.plots.drawing import (
    Json,
    Panel,
    axis,
    base_layout,
    grid,
    hover_value,
    numbered,
    points_per_curve,
    rank_line,
    rounded,
    short_names,
)
from paceline.report.plots.palette import colours
from paceline.report.plots.rank_panels import COLUMNS, POINTS, block_headings, ranks_to_draw

LEDE = (
    "Upper panels: CPU time of every rank ÷ wall time (100% is one core all the time). Lower panels: its resident "
    "memory. Both are sampled during the first repeat. The number at the right is how busy the cores of each host "
    "were, with all processes counted."
)
CAPTION = (
    "Solid line: the rank with the lowest number. Dotted lines: the other ranks. Dotted vertical lines: ends of "
    "epochs. Shaded: evaluation. Triangles: garbage collections."
)
"""Texts of the page above and below the plot."""

MOST_HOSTS = 3
"""Most hosts that are listed one by one."""
MOST_EPOCHS = 40
"""Most ends of epochs that are marked in a panel."""
MOST_COLLECTIONS = 100
"""Most garbage collections that are marked per candidate: the longest ones."""
LONGEST_NAME = 26
"""Longest name that leaves room beside it for how busy a host was."""
PLOT_HEIGHT, INNER_GAP, GAP_HEIGHT, TOP, BOTTOM = 92, 14, 58, 30, 40
BLOCK_HEIGHT = 2 * PLOT_HEIGHT + INNER_GAP
SHADES = {"evaluation": 0.10}
"""Opacity of the shading, by kind of event."""


@dataclass(frozen=True)
class _ResourceCurve:
    """Measurement of one rank over the run."""

    times: list[float]
    values: list[float]


@dataclass(frozen=True)
class _ResourcePanels:
    """Data of the two panels of a candidate."""

    row: CandidateRow
    cpu: dict[int, _ResourceCurve]
    """Per cent of a core, by rank."""
    memory: dict[int, _ResourceCurve]
    """Bytes, by rank."""
    marks: list[tuple[int, MarkRow]]
    """Rank and event."""
    busy: list[float]
    """Busy share of each host for which it is known."""

    def spans(self) -> list[MarkRow]:
        """Return the shaded events of the first rank."""
        return [mark for rank, mark in self.marks if mark.kind in SHADES and rank == min(self.cpu)]

    def epochs(self) -> list[MarkRow]:
        """Return the ends of epochs on the first rank, without the last, where training ends."""
        ends = [mark for rank, mark in self.marks if mark.kind == "epoch" and rank == min(self.cpu)][:-1]
        return ends[:: math.ceil(len(ends) / MOST_EPOCHS)] if ends else []

    def collections(self) -> list[tuple[int, MarkRow]]:
        """Return the longest garbage collections."""
        found = [(rank, mark) for rank, mark in self.marks if mark.kind == "gc"]
        found.sort(key=lambda one: one[1].start_s - one[1].end_s)
        return found[:MOST_COLLECTIONS]


def resources(comparison: Comparison) -> Json | None:
    """Return the plot; None where nothing was sampled."""
    panels = [found for row in comparison.rows if (found := _contents(comparison, row)) is not None]
    if not panels:
        return None
    colour_of = colours(comparison.record_set.candidates)
    unit = unit_for([value for panel in panels for curve in panel.memory.values() for value in curve.values], SIZES)
    points = points_per_curve(POINTS, 2 * sum(len(panel.cpu) for panel in panels))
    top = 1.08 * max([100.0, *[value for p in panels for curve in p.cpu.values() for value in curve.values]])
    data: list[Json] = []
    for number, panel in enumerate(panels):
        colour = colour_of[panel.row.candidate.name]
        upper = {"xaxis": numbered("x", 2 * number), "yaxis": numbered("y", 2 * number)}
        lower = {"xaxis": numbered("x", 2 * number + 1), "yaxis": numbered("y", 2 * number + 1)}
        drawn = [*_marks(panel, top), *_lines(panel.cpu, colour, points, replace(SHARE, scale=1), shape="vh")]
        data += [trace | upper for trace in drawn]
        data += [trace | lower for trace in _lines(panel.memory, colour, points, unit, shape="linear")]
    return {
        "title": "CPU and memory during the run",
        "data": data,
        "layout": _layout(panels, unit, top, COLUMNS),
        "medium": _layout(panels, unit, top, 2),
        "narrow": _layout(panels, unit, top, 1),
    }


def _contents(comparison: Comparison, row: CandidateRow) -> _ResourcePanels | None:
    runs = comparison.record_set.runs_of(row.candidate.name)
    run = runs[min(runs)] if runs else None
    if run is None or not any(len(samples) > 1 for samples in run.resources.values()):
        return None
    ranks = _ranks_to_show(run)
    cpu, memory = {}, {}
    for rank in ranks:
        samples = run.resources[rank]
        times, shares = cpu_shares(samples)
        cpu[rank] = _ResourceCurve([float(samples["time_s"][0]), *times.tolist()], _stepped((100 * shares).tolist()))
        memory[rank] = _ResourceCurve(samples["time_s"].tolist(), samples["resident_bytes"].tolist())
    return _ResourcePanels(
        row=row,
        cpu=cpu,
        memory=memory,
        marks=[(rank, mark) for rank in ranks for mark in run.marks.get(rank, [])],
        busy=[host.busy for host in host_usage(run) if host.busy is not None],
    )


def _ranks_to_show(run: RunRecord) -> list[int]:
    """Return the ranks to draw; of many ranks, those with the least and the most CPU time."""
    used = [own for own in usage(run) if len(run.resources[own.rank]) > 1]
    ordered = [own.rank for own in sorted(used, key=lambda own: own.cpu_share or 0.0)]
    return ranks_to_draw(ordered)


def _stepped(values: list[float]) -> list[float]:
    """Repeat the first value, since each value holds from the previous point on, the first from the start."""
    return [*values[:1], *values]


def _lines(curves: dict[int, _ResourceCurve], colour: str, points: int, unit: Unit, *, shape: str) -> list[Json]:
    """Return a line per rank."""
    found = []
    for place, (rank, curve) in enumerate(curves.items()):
        kept = thinned(curve.values, points)
        found.append(
            rank_line(
                place,
                rank,
                colour,
                x=rounded(curve.times[i] for i in kept),
                y=rounded(curve.values[i] / unit.scale for i in kept),
                line={"shape": shape},
                hovertemplate=f"%{{meta}} at {hover_value('x', TENTHS)} s: {hover_value('y', unit)}<extra></extra>",
            )
        )
    return found


def _marks(panel: _ResourcePanels, top: float) -> list[Json]:
    """Return markers with tooltips: spans at the top of the upper panel, garbage collections at its bottom."""
    collections = panel.collections()
    shown = [
        _points(
            [(mark.start_s + mark.end_s) / 2 for mark in panel.spans()],
            top,
            [f"{mark.kind}, {seconds(mark.end_s - mark.start_s)}" for mark in panel.spans()],
            "square",
        ),
        _points(
            [mark.end_s for mark in panel.epochs()],
            top,
            [_epoch_end(mark.detail) for mark in panel.epochs()],
            "line-ns",
        ),
        _points(
            [mark.start_s for _, mark in collections],
            0,
            [f"garbage collection of rank {r}, {seconds(mark.end_s - mark.start_s)}" for r, mark in collections],
            "triangle-up",
        ),
    ]
    return [trace for trace in shown if trace["x"]]


def _points(times: Sequence[float], height: float, texts: Sequence[str], symbol: str) -> Json:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": rounded(times),
        "y": [height] * len(times),
        "customdata": list(texts),
        "marker": {"symbol": symbol, "color": "@muted", "size": 6, "line": {"color": "@muted", "width": 1}},
        "cliponaxis": False,
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _layout(panels: Sequence[_ResourcePanels], unit: Unit, top: float, columns: int) -> Json:
    columns = min(columns, len(panels))
    lines = math.ceil(len(panels) / columns)
    height = lines * BLOCK_HEIGHT + (lines - 1) * GAP_HEIGHT
    places = grid(len(panels), columns, gap_x=0.055, gap_y=GAP_HEIGHT / height)
    layout = base_layout(height + TOP + BOTTOM, left=58, right=8, top=TOP, bottom=BOTTOM)
    layout |= {"hovermode": "closest", "annotations": [], "shapes": []}
    last_s = max([0.1, *[t for panel in panels for curve in panel.cpu.values() for t in curve.times]])
    most = max([1.0, *[v / unit.scale for panel in panels for c in panel.memory.values() for v in c.values]])
    names = short_names([panel.row.candidate.name for panel in panels], LONGEST_NAME)
    for number, (panel, place) in enumerate(zip(panels, places, strict=True)):
        at_left, at_bottom = number % columns == 0, number + columns >= len(panels)
        upper, lower = _halves(place)
        x_range = [0, 1.01 * last_s]
        layout |= _axes(2 * number, upper, "CPU, %", [0, top], x_range, at_left=at_left, at_bottom=False)
        layout |= _axes(
            2 * number + 1,
            lower,
            f"memory, {unit.name}",
            [0, 1.08 * most],
            x_range,
            at_left=at_left,
            at_bottom=at_bottom,
        )
        for axes in (2 * number, 2 * number + 1):
            layout["shapes"] += [*_shades(panel, axes), *_epoch_lines(panel, axes)]
        layout["annotations"] += block_headings(names[panel.row.candidate.name], _format_busy(panel.busy), place)
    return layout


def _halves(place: Panel) -> tuple[Panel, Panel]:
    """Split the area of a candidate into its upper and lower panel."""
    pixel = (place.y[1] - place.y[0]) / BLOCK_HEIGHT
    middle = place.y[0] + PLOT_HEIGHT * pixel
    return Panel(place.x, (middle + INNER_GAP * pixel, place.y[1])), Panel(place.x, (place.y[0], middle))


def _axes(
    number: int, part: Panel, title: str, reach: list[float], x_range: list[float], *, at_left: bool, at_bottom: bool
) -> Json:
    """Return the axes of one panel; only the outermost ones are labelled, since all panels share a scale."""
    across = axis(
        "seconds" if at_bottom else None,
        domain=part.x,
        anchor=numbered("y", number),
        showgrid=False,
        nticks=6,
        showticklabels=at_bottom,
        range=x_range,
    )
    up = axis(
        title if at_left else None,
        domain=part.y,
        anchor=numbered("x", number),
        nticks=4,
        showticklabels=at_left,
        range=reach,
    )
    return {numbered("xaxis", number): across, numbered("yaxis", number): up}


def _shades(panel: _ResourcePanels, number: int) -> list[Json]:
    """Return shaded spans over the whole height of a panel."""
    return [
        {
            "type": "rect",
            "xref": numbered("x", number),
            "yref": f"{numbered('y', number)} domain",
            "x0": mark.start_s,
            "x1": mark.end_s,
            "y0": 0,
            "y1": 1,
            "fillcolor": "@muted",
            "opacity": SHADES[mark.kind],
            "line": {"width": 0},
            "layer": "below",
        }
        for mark in panel.spans()
    ]


def _epoch_lines(panel: _ResourcePanels, number: int) -> list[Json]:
    """Return a vertical line at the end of every epoch."""
    return [
        {
            "type": "line",
            "xref": numbered("x", number),
            "yref": f"{numbered('y', number)} domain",
            "x0": mark.end_s,
            "x1": mark.end_s,
            "y0": 0,
            "y1": 1,
            "line": {"color": "@muted", "width": 0.8, "dash": "dot"},
            "layer": "below",
        }
        for mark in panel.epochs()
    ]


def _format_busy(shares: Sequence[float]) -> str:
    """Format how busy the hosts were; of many hosts, the least and the most busy. Empty where it is unknown."""
    if not shares:
        return ""
    if len(shares) == 1:
        return f"host {percent(shares[0], 0)} busy"
    if len(shares) <= MOST_HOSTS:
        return f"hosts {', '.join(percent(share, 0) for share in shares)} busy"
    return f"hosts {percent(min(shares), 0)} to {percent(max(shares), 0)} busy"


def _epoch_end(detail: str) -> str:
    epoch = whole_number(detail)
    return "epoch" if epoch is None else f"end of epoch {epoch + 1}"
