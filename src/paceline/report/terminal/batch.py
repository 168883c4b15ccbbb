"""Terminal output of an experiment over batch sizes: its tables, then the verdict and the next command; as JSON too."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from paceline.analysis.batch.points import BatchPoint, BatchSizes
from paceline.analysis.batch.progress import progress_curve
from paceline.analysis.statistics import MIN_REPEATS
from paceline.formatting import short, whole
from paceline.records.events import FailureEvent, events_of
from paceline.records.writer import json_safe
from paceline.report.batch_verdict import (
    length_phrase,
    memory_sentence,
    next_command,
    point_outcome,
    sentences,
)
from paceline.report.figures.batch import BATCH_TABLES, batch_point_json
from paceline.report.figures.columns import terminal_columns, text_column
from paceline.report.tables.json_rows import evaluations_json
from paceline.report.terminal.lines import print_line
from paceline.report.terminal.table import figure_table

TITLES = {
    "time": "Time per epoch and samples per second",
    "communication": "Computation and communication per epoch",
    "resources": "Memory and processors",
    "training": "Loss and accuracy",
}
"""Titles of the tables."""
INTERVALS = "± is half the width of the 95% interval."


def print_batch_sizes(found: BatchSizes, console: Console) -> None:
    """Print the tables, the verdict and the warnings."""
    for name in TITLES:
        table = _table(found, name, console.width)
        if table is not None:
            print_line(console, title_of(found, name))
            console.print(table)
            console.print()
    if any(point.row.repeats >= MIN_REPEATS for point in found.points):
        print_line(console, INTERVALS)
    for point in found.points:
        if point.row.failure:
            print_line(console, memory_sentence(point))
    for sentence in sentences(found):
        print_line(console, sentence)
    for warning in found.warnings:
        print_line(console, f"note: {warning}")


def title_of(found: BatchSizes, name: str) -> str:
    """Return the title of a table; that of training says when runs are compared."""
    if name != "training":
        return TITLES[name]
    end, equal = length_phrase(found), "at equal time"
    return TITLES[name] + (f" {equal}" if end == equal else f", {end} and {equal}")


def _table(found: BatchSizes, name: str, width: int) -> Table | None:
    """Return one of the tables; None where it has no figures."""
    points = found.points
    columns = terminal_columns(BATCH_TABLES[name], points, epoch_headings(found, short=True))
    if not columns:
        return None
    several = any(point.hosts > 1 for point in points)
    labels = [
        text_column("strategy", [_strategy(points, place) for place in range(len(points))]),
        text_column("ranks/hosts" if several else "ranks", [_ranks(point, several=several) for point in points]),
        text_column("batch", [_batch(point, found) for point in points]),
    ]
    styles = [None if point.row.is_measured and not point.oversubscribed else "dim" for point in points]
    return figure_table([*labels, *columns], width, styles=styles, names=3)


def epoch_headings(found: BatchSizes, *, short: bool) -> dict[str, str]:
    """Return headings that say that times per epoch are extrapolated, where they are."""
    if not found.epochs_are_extrapolated:
        return {}
    return {"epoch_s": "epoch (extrapolated)" if short else "Time per epoch, extrapolated"}


def _strategy(points: list[BatchPoint], place: int) -> str:
    """Return the strategy's name for the first of its points on some ranks, else nothing."""
    point = points[place]
    before = points[place - 1] if place else None
    same = before is not None and (before.strategy, before.ranks, before.hosts) == (
        point.strategy,
        point.ranks,
        point.hosts,
    )
    return "" if same else point.strategy


def _ranks(point: BatchPoint, *, several: bool) -> str:
    mark = " *" if point.oversubscribed else ""
    return (f"{point.ranks}/{point.hosts}" if several else str(point.ranks)) + mark


def _batch(point: BatchPoint, found: BatchSizes) -> str:
    state = f" {remark}" if (remark := point_outcome(point)) else ""
    each = f" ({short(point.batch_per_rank)} each)" if found.design.per_rank else ""
    return whole(point.batch) + each + state


def to_json(found: BatchSizes) -> dict[str, Any]:
    """Return the whole result as JSON data."""
    comparison, best = found.comparison, found.best
    return {
        "records": found.record_set.sources,
        "kind": "batch",
        "points": [batch_point_json(point) for point in found.points],
        "best": best and best.candidate.name,
        "alternatives": [alternative.to_dict() for alternative in found.alternatives],
        "fastest": [
            {
                "strategy": curve.strategy,
                "ranks": curve.ranks,
                "hosts": curve.hosts,
                "batch": curve.best and curve.best.batch,
                "stops_paying_at": curve.enough and curve.enough.batch,
                "out_of_memory_at": curve.first_without_memory and curve.first_without_memory.batch,
            }
            for curve in found.curves
        ],
        "equal_time_s": found.equal_time_s and found.equal_time_s.to_dict(),
        "training_curves": json_safe(
            {
                point.candidate.name: [
                    {"repeat": repeat, "points": [msgspec.to_builtins(own) for own in progress_curve(run)]}
                    for (_, repeat), run in found.record_set.runs_of(point.candidate.name).items()
                ]
                for point in found.points
            }
        ),
        "evaluations": json_safe(
            {
                point.candidate.name: [
                    {"repeat": repeat, "points": evaluations_json(run)}
                    for (_, repeat), run in found.record_set.runs_of(point.candidate.name).items()
                ]
                for point in found.points
            }
        ),
        "verdict": sentences(found),
        "interrupted": comparison.interrupted,
        "warnings": found.warnings,
        "proofs": [proof.to_dict() for proof in comparison.proofs],
        "failures": msgspec.to_builtins(events_of(found.record_set.events, FailureEvent)),
        "design": msgspec.to_builtins(found.design),
        "examination": comparison.examination and comparison.examination.to_dict(),
        "next": next_command(found),
    }
