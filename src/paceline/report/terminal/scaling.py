"""Terminal output of a scaling experiment: a table for strong and for weak scaling, then the verdict; as JSON too."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from paceline.analysis.scaling.curves import Mode, Scaling, ScalingPoint
from paceline.analysis.statistics import MIN_REPEATS
from paceline.records.events import FailureEvent, events_of
from paceline.report.figures.columns import terminal_columns, text_column
from paceline.report.figures.points import PART_FIGURES, POINT_FIGURES, point_json
from paceline.report.run_description import outcome
from paceline.report.scaling_verdict import (
    TITLES,
    closing_sentences,
    format_mode,
    headline_sentence,
    learning_rate_note,
    mode_sentences,
    sentences,
)
from paceline.report.tables.json_rows import payloads_json
from paceline.report.terminal.lines import print_line
from paceline.report.terminal.table import figure_table

INTERVALS = (
    "± is half the width of the 95% interval. It is the same for an efficiency and its speed-up, and for the time of "
    "an epoch and of a step."
)

BOTH_REPEATS = "Two values in parentheses are those of two repeats, which give no interval."


def print_scaling(scaling: Scaling, console: Console) -> None:
    """Print the tables, the verdict and the warnings."""
    for mode in scaling.modes:
        print_line(console, f"{TITLES[mode]}: {format_mode(scaling, mode)}")
        console.print(_table(scaling, mode, console.width))
        if any(point.row.repeats >= MIN_REPEATS for point in scaling.points(mode)):
            print_line(console, INTERVALS)
        if any(point.row.repeats == 2 for point in scaling.points(mode)):
            print_line(console, BOTH_REPEATS)
        for sentence in mode_sentences(scaling, mode):
            print_line(console, sentence)
        console.print()
    for row in scaling.comparison.rows:
        if row.failure:
            print_line(console, f"{row.candidate.name} failed: {row.failure}")
    for sentence in (headline_sentence(scaling), *closing_sentences(scaling)):
        print_line(console, sentence)
    for warning in scaling.warnings:
        print_line(console, f"note: {warning}")
    print_line(console, f"note: {learning_rate_note(scaling)}")


def _table(scaling: Scaling, mode: Mode, width: int) -> Table:
    points = scaling.points(mode)
    several = any(point.hosts > 1 for point in points)
    columns = [
        text_column("strategy", [_name(points, place) for place in range(len(points))]),
        text_column("ranks/hosts" if several else "ranks", [_ranks(point, several=several) for point in points]),
        *terminal_columns((*POINT_FIGURES, *PART_FIGURES), points),
    ]
    styles = [None if p.candidate.role == "candidate" and p.is_comparable else "dim" for p in points]
    return figure_table(columns, width, styles=styles, names=2)


def _name(points: list[ScalingPoint], place: int) -> str:
    """Return the strategy's name for the first of its points, else nothing."""
    point = points[place]
    repeated = place > 0 and points[place - 1].strategy == point.strategy
    return "" if repeated else point.strategy


def _ranks(point: ScalingPoint, *, several: bool) -> str:
    mark = f" {outcome(point.row)}" if point.row.failure else " *" if point.oversubscribed else ""
    return (f"{point.ranks}/{point.hosts}" if several else str(point.ranks)) + mark


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
        "payload": payloads_json(comparison.payloads),
        "failures": msgspec.to_builtins(events_of(scaling.record_set.events, FailureEvent)),
        "design": msgspec.to_builtins(scaling.design),
        "examination": comparison.examination and comparison.examination.to_dict(),
    }


def _mode_json(scaling: Scaling, mode: Mode) -> dict[str, Any]:
    best = scaling.best(mode)
    peaks = [peak for curve in scaling.candidates(mode) if (peak := scaling.peak(curve)) is not None]
    return {
        "kind": format_mode(scaling, mode),
        "points": [point_json(point) for point in scaling.points(mode)],
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
