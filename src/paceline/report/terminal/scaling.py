"""A scaling experiment in the terminal and as JSON: a table per kind of scaling, then what it comes down to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.analysis.scaling.curves import Mode, Scaling, ScalingPoint
from paceline.analysis.statistics import Estimate
from paceline.analysis.steps.split import PARTS
from paceline.report.formatting import factor, percent, seconds
from paceline.report.scaling_verdict import (
    NOT_SCALED,
    TITLES,
    closing,
    headline_of,
    kind_in_words,
    mode_sentences,
    sentences,
)
from paceline.report.terminal.comparison import TerminalColumn, fitting

NOTHING = "–"
INTERVALS = "± is half of a 95% interval. An efficiency has that of its speed-up, an epoch that of its step."


def print_scaling(scaling: Scaling, console: Console) -> None:
    """The tables, the sentences, and what to know before believing them."""
    for mode in scaling.modes:
        _notify(console, f"{TITLES[mode]}: {kind_in_words(scaling, mode)}")
        console.print(_table(scaling, mode, console.width))
        if any(point.row.repeats > 1 for point in scaling.points(mode)):
            _notify(console, INTERVALS)
        for sentence in mode_sentences(scaling, mode):
            _notify(console, sentence)
        console.print()
    for row in scaling.comparison.rows:
        if row.failure:
            _notify(console, f"{row.candidate.name} failed: {row.failure}")
    for sentence in (headline_of(scaling), *closing(scaling)):
        _notify(console, sentence)
    for warning in scaling.warnings:
        _notify(console, f"note: {warning}")
    _notify(console, f"note: {NOT_SCALED}")


def print_report(report: Path | None, console: Console) -> None:
    """Where the page is."""
    if report:
        _notify(console, f"report: {report}")


def _notify(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _table(scaling: Scaling, mode: Mode, width: int) -> Table:
    points = scaling.points(mode)
    columns = fitting(_columns(points), width)
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
    """Of the shares the two that say most; the page and the JSON have all four."""
    several = any(point.hosts > 1 for point in points)
    return [
        TerminalColumn("strategy", [_name(points, place) for place in range(len(points))], 10),
        TerminalColumn("ranks/hosts" if several else "ranks", [_ranks(point, several=several) for point in points], 10),
        TerminalColumn("batch", [f"{point.batch:,}" for point in points], 7),
        TerminalColumn(
            "time/step", _beside([_value(p.row.step_s) for p in points], [_around(p.row.step_s) for p in points]), 10
        ),
        TerminalColumn("epoch", [_value(point.epoch_s) for point in points], 3),
        TerminalColumn("vs single", _gains(points, "over_single"), 9),
        TerminalColumn("vs itself", _gains(points, "over_one_rank"), 8),
        TerminalColumn("compute", [_part(point, "compute") for point in points], 5),
        TerminalColumn("exposed", [_part(point, "exposed") for point in points], 6),
    ]


def _name(points: list[ScalingPoint], place: int) -> str:
    """A strategy's name beside the first of its points."""
    point = points[place]
    repeated = place > 0 and points[place - 1].strategy == point.strategy
    return "" if repeated else point.strategy


def _ranks(point: ScalingPoint, *, several: bool) -> str:
    mark = " failed" if point.row.failure else " *" if point.oversubscribed else ""
    return (f"{point.ranks}/{point.hosts}" if several else str(point.ranks)) + mark


def _value(estimate: Estimate | None) -> str:
    return NOTHING if estimate is None else seconds(estimate.value)


def _around(estimate: Estimate | None) -> str:
    """Half of the interval, as a share of the value; nothing where there is none."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return ""
    half = (estimate.high - estimate.low) / 2 / estimate.value
    return f"±{percent(half, 0)}" if half < 1 else ">±100%"


def _beside(*parts: list[str]) -> list[str]:
    """Cells of several parts, aligned below each other; a part that no cell has takes no room."""
    widths = [max(map(len, own), default=0) for own in parts]
    rows = zip(*parts, strict=True)
    return [" ".join(f"{part:>{width}}" for part, width in zip(row, widths, strict=True) if width) for row in rows]


def _gains(points: list[ScalingPoint], key: str) -> list[str]:
    """Speed-up with its interval, and efficiency; a dash where none is claimed."""
    known = [None if point.oversubscribed else point.gains[key] for point in points]
    return _beside(
        [NOTHING if gain is None else factor(gain.speed_up.value) for gain in known],
        ["" if gain is None else _around(gain.speed_up) for gain in known],
        ["" if gain is None else NOTHING if gain.efficiency is None else _share(gain.efficiency) for gain in known],
    )


def _share(estimate: Estimate) -> str:
    return percent(estimate.value, 0)


def _part(point: ScalingPoint, part: str) -> str:
    """A share of the step, with half of its interval in points of it."""
    split = point.row.split
    if split is None:
        return NOTHING
    share: Estimate = getattr(split, part)
    if share.low is None or share.high is None:
        return _share(share)
    return f"{_share(share)} ±{50 * (share.high - share.low):.0f}"


def to_json(scaling: Scaling) -> dict[str, Any]:
    """The whole result, for scripts."""
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
        "failures": [event for event in scaling.record_set.events if event["event"] == "failure"],
        "design": dict(scaling.design),
        "examination": comparison.examination and comparison.examination.to_dict(),
    }


def _mode_json(scaling: Scaling, mode: Mode) -> dict[str, Any]:
    best = scaling.best(mode)
    peaks = [peak for curve in scaling.candidates(mode) if (peak := scaling.peak(curve)) is not None]
    return {
        "kind": kind_in_words(scaling, mode),
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
    """Seconds of a step by where they go, on average over ranks and repeats."""
    split = point.row.split
    return None if split is None else {part: getattr(split.mean, f"{part}_s") for part in PARTS}
