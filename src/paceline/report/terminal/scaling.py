"""Terminal output of a scaling experiment: a table for strong and for weak scaling, then the verdict; as JSON too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.analysis.scaling.curves import Mode, Scaling, ScalingPoint
from paceline.analysis.statistics import Estimate
from paceline.analysis.steps.split import PARTS
from paceline.records.events import FailureEvent, events_of
from paceline.report.formatting import factor, percent, seconds
from paceline.report.scaling_verdict import (
    NOT_SCALED,
    TITLES,
    closing_sentences,
    format_mode,
    headline_sentence,
    mode_sentences,
    sentences,
)
from paceline.report.terminal.comparison import TerminalColumn, fit_columns

NOTHING = "–"
INTERVALS = (
    "± is half the width of the 95% interval. It is the same for an efficiency and its speed-up, and for the time of "
    "an epoch and of a step."
)


def print_scaling(scaling: Scaling, console: Console) -> None:
    """Print the tables, the verdict and the warnings."""
    for mode in scaling.modes:
        _print(console, f"{TITLES[mode]}: {format_mode(scaling, mode)}")
        console.print(_table(scaling, mode, console.width))
        if any(point.row.repeats > 1 for point in scaling.points(mode)):
            _print(console, INTERVALS)
        for sentence in mode_sentences(scaling, mode):
            _print(console, sentence)
        console.print()
    for row in scaling.comparison.rows:
        if row.failure:
            _print(console, f"{row.candidate.name} failed: {row.failure}")
    for sentence in (headline_sentence(scaling), *closing_sentences(scaling)):
        _print(console, sentence)
    for warning in scaling.warnings:
        _print(console, f"note: {warning}")
    _print(console, f"note: {NOT_SCALED}")


def print_report(report: Path | None, console: Console) -> None:
    """Print the path of the report."""
    if report:
        _print(console, f"report: {report}")


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _table(scaling: Scaling, mode: Mode, width: int) -> Table:
    points = scaling.points(mode)
    columns = fit_columns(_columns(points), width)
    table = Table(box=None, pad_edge=False, header_style="bold")
    names, *figures = columns
    table.add_column(escape(names.heading), no_wrap=True)
    for column in figures:
        table.add_column(escape(column.heading), justify="right", no_wrap=True)
    for place, point in enumerate(points):
        style = None if point.candidate.role == "candidate" and point.is_comparable else "dim"
        table.add_row(*[escape(column.cells[place]) for column in columns], style=style)
    return table


def _columns(points: list[ScalingPoint]) -> list[TerminalColumn]:
    """Return the columns, with the two most useful shares; the page and the JSON output have all four."""
    several = any(point.hosts > 1 for point in points)
    return [
        TerminalColumn("strategy", [_name(points, place) for place in range(len(points))], 10),
        TerminalColumn("ranks/hosts" if several else "ranks", [_ranks(point, several=several) for point in points], 10),
        TerminalColumn("batch", [f"{point.batch:,}" for point in points], 7),
        TerminalColumn(
            "time/step",
            _align([_value(p.row.step_s) for p in points], [_half_interval(p.row.step_s) for p in points]),
            10,
        ),
        TerminalColumn("epoch", [_value(point.epoch_s) for point in points], 3),
        TerminalColumn("vs single", _gains(points, "over_single"), 9),
        TerminalColumn("vs itself", _gains(points, "over_one_rank"), 8),
        TerminalColumn("compute", [_part(point, "compute") for point in points], 5),
        TerminalColumn("exposed", [_part(point, "exposed") for point in points], 6),
    ]


def _name(points: list[ScalingPoint], place: int) -> str:
    """Return the strategy's name for the first of its points, else nothing."""
    point = points[place]
    repeated = place > 0 and points[place - 1].strategy == point.strategy
    return "" if repeated else point.strategy


def _ranks(point: ScalingPoint, *, several: bool) -> str:
    mark = " failed" if point.row.failure else " *" if point.oversubscribed else ""
    return (f"{point.ranks}/{point.hosts}" if several else str(point.ranks)) + mark


def _value(estimate: Estimate | None) -> str:
    return NOTHING if estimate is None else seconds(estimate.value)


def _half_interval(estimate: Estimate | None) -> str:
    """Format half of the interval as a share of the value; empty where there is none."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return ""
    half = (estimate.high - estimate.low) / 2 / estimate.value
    return f"±{percent(half, 0)}" if half < 1 else ">±100%"


def _align(*parts: list[str]) -> list[str]:
    """Join several parts of each cell, aligned in columns; a part that is empty in all cells is left out."""
    widths = [max(map(len, own), default=0) for own in parts]
    rows = zip(*parts, strict=True)
    return [" ".join(f"{part:>{width}}" for part, width in zip(row, widths, strict=True) if width) for row in rows]


def _gains(points: list[ScalingPoint], key: str) -> list[str]:
    """Format speed-up with its interval, and efficiency; a dash where none is claimed."""
    known = [None if point.oversubscribed else point.gains[key] for point in points]
    return _align(
        [NOTHING if gain is None else factor(gain.speed_up.value) for gain in known],
        ["" if gain is None else _half_interval(gain.speed_up) for gain in known],
        ["" if gain is None else NOTHING if gain.efficiency is None else _share(gain.efficiency) for gain in known],
    )


def _share(estimate: Estimate) -> str:
    return percent(estimate.value, 0)


def _part(point: ScalingPoint, part: str) -> str:
    """Format a share of the step, with half of its interval in percentage points."""
    split = point.row.split
    if split is None:
        return NOTHING
    share: Estimate = getattr(split, part)
    if share.low is None or share.high is None:
        return _share(share)
    return f"{_share(share)} ±{50 * (share.high - share.low):.0f}"


def to_json(scaling: Scaling) -> dict[str, Any]:
    """Return the whole result as JSON data."""
    comparison = scaling.comparison
    return {
        "records": scaling.record_set.sources,
        "kind": "scale",
        "modes": {mode: _mode_json(scaling, mode) for mode in scaling.modes},
        "verdict": sentences(scaling),
        "interrupted": comparison.interrupted,
        "warnings": scaling.warnings,
        "proofs": [proof.to_dict() for proof in comparison.proofs],
        "payload": {name: payload.to_dict() for name, payload in comparison.payloads.items()},
        "failures": msgspec.to_builtins(events_of(scaling.record_set.events, FailureEvent)),
        "design": msgspec.to_builtins(scaling.design),
        "examination": comparison.examination and comparison.examination.to_dict(),
    }


def _mode_json(scaling: Scaling, mode: Mode) -> dict[str, Any]:
    best = scaling.best(mode)
    peaks = [peak for curve in scaling.candidates(mode) if (peak := scaling.peak(curve)) is not None]
    return {
        "kind": format_mode(scaling, mode),
        "points": [point.to_dict() | {"split_s": _split_json(point)} for point in scaling.points(mode)],
        "best": best and best.candidate.name,
        "fastest": {
            peak.best.candidate.name: {
                "strategy": peak.curve.strategy,
                "ranks": peak.best.ranks,
                "before_ranks": peak.before_ranks,
                "before": peak.before and peak.before.to_dict(),
                "beyond": peak.beyond and peak.beyond.to_dict(),
                "beyond_ranks": peak.beyond_ranks,
            }
            for peak in peaks
        },
    }


def _split_json(point: ScalingPoint) -> dict[str, float] | None:
    """Return the time split in seconds per step, the mean over ranks and repeats."""
    split = point.row.split
    return None if split is None else {part: getattr(split.mean, f"{part}_s") for part in PARTS}
