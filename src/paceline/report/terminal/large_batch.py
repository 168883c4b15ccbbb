"""Terminal output of an experiment with large batches, and the same as JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console

from paceline.analysis.large_batch.results import LargeBatches
from paceline.formatting import whole
from paceline.records.events import FailureEvent, events_of
from paceline.records.writer import json_safe
from paceline.report.figures.columns import terminal_columns, text_column
from paceline.report.figures.large_batch import LARGE_BATCH_FIGURES, large_batch_json
from paceline.report.large_batch_verdict import remedy_notes, row_name, row_outcome, sentences
from paceline.report.tables.json_rows import evaluations_json
from paceline.report.terminal.lines import print_line
from paceline.report.terminal.table import figure_table

INTERVALS = "± is half the width of the 95% interval over seeds, in percentage points for accuracies."


def print_large_batches(found: LargeBatches, console: Console) -> None:
    """Print the remedies, the table, the verdict and the warnings."""
    for name, description in remedy_notes(found):
        print_line(console, f"{name}: {description}")
    console.print()
    rows = found.rows
    labels = [
        text_column("batch", [whole(row.batch) for row in rows]),
        text_column("remedies", [row_name(row) for row in rows]),
    ]
    columns = [*labels, *terminal_columns(LARGE_BATCH_FIGURES, rows)]
    styles = ["dim" if row.accuracy is None else "bold" if row.is_reference else None for row in rows]
    console.print(figure_table(columns, console.width, styles=styles, names=2, name_side="right"))
    console.print()
    if any(row.row.test_accuracy is not None and row.row.test_accuracy.low is not None for row in rows):
        print_line(console, INTERVALS)
    for sentence in sentences(found):
        print_line(console, sentence)
    for row in rows:
        if row_outcome(row) == "failed":
            print_line(console, f"{row.row.candidate.name} failed: {row.row.failure}")
    for warning in warnings(found):
        print_line(console, f"note: {warning}")


def warnings(found: LargeBatches) -> list[str]:
    """Return sentences on what was not tried, and on the records."""
    return [*found.design.left_out, *found.comparison.warnings]


def to_json(found: LargeBatches) -> dict[str, Any]:
    """Return the whole result as JSON data."""
    return {
        "records": found.record_set.sources,
        "kind": "large-batch",
        "remedies": dict(remedy_notes(found)),
        "candidates": [large_batch_json(row) for row in found.rows],
        "best": {str(size): best.row.candidate.name for size in found.by_size if (best := found.best(size))},
        "repaired": {
            str(size): bool(best and best.is_repaired) for size in found.by_size for best in [found.best(size)]
        },
        "evaluations": json_safe(
            {
                row.row.candidate.name: [
                    {"repeat": repeat, "points": evaluations_json(run)}
                    for (_, repeat), run in found.record_set.runs_of(row.row.candidate.name).items()
                ]
                for row in found.rows
            }
        ),
        "verdict": sentences(found),
        "interrupted": found.comparison.interrupted,
        "warnings": warnings(found),
        "failures": msgspec.to_builtins(events_of(found.record_set.events, FailureEvent)),
        "design": msgspec.to_builtins(found.design),
    }
