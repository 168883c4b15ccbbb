"""Terminal output of a comparison: the table, best first, the verdict, and the next command; the same as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.analysis.statistics import Estimate
from paceline.report.explanations import explain
from paceline.report.formatting import factor, number, percent, seconds, size, time_range
from paceline.report.tables.resources import first_runs, run_json, sampling_share, usage_json
from paceline.report.verdict import next_command, sentences

ROLES = {"bound": "bound", "baseline": "baseline", "candidate": ""}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the table and the verdict."""
    columns = fit_columns(_columns(comparison), console.width)
    table = Table(box=None, pad_edge=False, header_style="bold")
    names, *figures = columns
    table.add_column(escape(names.heading), no_wrap=True, min_width=12)
    for column in figures:
        table.add_column(escape(column.heading), justify="right", no_wrap=True)
    for place, row in enumerate(comparison.rows):
        style = None if row.candidate.role == "candidate" and not row.failure else "dim"
        table.add_row(*[escape(column.cells[place]) for column in columns], style=style)
    console.print(table)
    for row in comparison.rows:
        if row.failure:
            console.print(f"{row.candidate.name} failed: {row.failure}", markup=False, highlight=False, soft_wrap=True)
    console.print()
    for sentence in sentences(comparison):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    for warning in comparison.warnings:
        console.print(f"note: {warning}", markup=False, highlight=False, soft_wrap=True)


def print_next(comparison: Comparison, report: Path | None, console: Console) -> None:
    """Print the path of the report and the suggested next command."""
    if report:
        console.print(f"report: {report}", markup=False, highlight=False, soft_wrap=True)
    command = next_command(comparison)
    if command:
        console.print(f"next:   {command}", markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class TerminalColumn:
    """Column of a table in the terminal."""

    heading: str
    cells: list[str]
    priority: int
    """Columns of lower priority are dropped first where the terminal is too narrow."""

    @property
    def is_empty(self) -> bool:
        """Return whether no cell has a value."""
        return all(cell == "–" for cell in self.cells)

    @property
    def width(self) -> int:
        """Characters it takes, with the gap before it."""
        return 2 + max(map(cell_len, [self.heading, *self.cells]))


def _columns(comparison: Comparison) -> list[TerminalColumn]:
    rows = comparison.rows
    return [
        TerminalColumn("strategy" if _by_strategy(comparison) else "setting", [_name(row) for row in rows], 10),
        TerminalColumn("time/step", [_value(row.step_s, seconds) for row in rows], 10),
        TerminalColumn("95% interval", [_interval(row.step_s) for row in rows], 5),
        TerminalColumn(_ratio_heading(comparison.reference), [_value(row.ratio, factor) for row in rows], 9),
        *_split(rows),
        TerminalColumn("sent/step", [size(row.busiest_sent_bytes) for row in rows], 6),
        TerminalColumn("samples/s", [_value(row.samples_per_s, lambda value: f"{value:,.0f}") for row in rows], 4),
        TerminalColumn("loss", [_value(row.train_loss, number) for row in rows], 3),
        TerminalColumn("test loss", [_value(row.test_loss, number) for row in rows], 1),
        TerminalColumn("accuracy", [_value(row.test_accuracy, percent) for row in rows], 7),
        TerminalColumn("memory", [size(row.peak_bytes) for row in rows], 2),
    ]


def _split(rows: Sequence[CandidateRow]) -> list[TerminalColumn]:
    """Return the shares of the step; without events, the share above the bound."""
    if all(row.split is None for row in rows):
        return [TerminalColumn("above bound", [_value(row.above_bound, _share) for row in rows], 8)]
    return [
        TerminalColumn("compute", [_value(row.split.compute if row.split else None, _share) for row in rows], 4),
        TerminalColumn("overlapped", [_value(row.split.overlapped if row.split else None, _share) for row in rows], 4),
        TerminalColumn("exposed", [_value(row.exposed, _share) for row in rows], 8),
    ]


def _share(value: float) -> str:
    return percent(value, 0)


def fit_columns(columns: list[TerminalColumn], width: int) -> list[TerminalColumn]:
    """Return the columns that fit into the terminal. The page and the JSON output have all of them.

    Columns are dropped one at a time: empty ones first, then those of the lowest priority, the last of equals first.
    """
    kept = list(columns)
    while sum(column.width for column in kept) - 2 > width and len(kept) > 2:
        kept.remove(min(reversed(kept[1:]), key=lambda column: (not column.is_empty, column.priority)))
    return kept


def _name(row: CandidateRow) -> str:
    remark = "failed" if row.failure else ROLES[row.candidate.role]
    return row.candidate.name + (f" ({remark})" if remark else "")


def _interval(estimate: Estimate | None) -> str:
    """Format the interval without its unit, which is that of the value beside it."""
    if estimate is None:
        return "–"
    return time_range(estimate.low, estimate.high, around=estimate.value).rpartition(" ")[0] or "–"


def _ratio_heading(reference: str | None) -> str:
    """Return the heading of the ratios; a long name would make the table too wide."""
    return f"÷ {reference}" if reference and len(reference) <= 10 else "÷ reference"


def _value(estimate: Estimate | None, write: Callable[[float], str]) -> str:
    return "–" if estimate is None else write(estimate.value)


def _by_strategy(comparison: Comparison) -> bool:
    return len({row.candidate.strategy for row in comparison.rows}) > 1 or not comparison.rows[0].candidate.settings


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return the whole result as JSON data; operators and resources are those of the first repeat."""
    runs = first_runs(comparison)
    return {
        "records": comparison.record_set.sources,
        "reference": comparison.reference,
        "verdict": sentences(comparison),
        "decision": comparison.decision.to_dict(),
        "interrupted": comparison.interrupted,
        "warnings": comparison.warnings,
        "rows": [row.to_dict() for row in comparison.rows],
        "proofs": [proof.to_dict() for proof in comparison.proofs],
        "loss_differences": [loss_difference.to_dict() for loss_difference in comparison.loss_differences],
        "why": [reason.to_dict() for reason in explain(comparison)],
        "wire": {name: asdict(wire) for name, wire in comparison.wires.items()},
        "payload": {name: payload.to_dict() for name, payload in comparison.payloads.items()},
        "operators": {name: rows for name, run in runs.items() if (rows := run_json(run)["operators"])},
        "resources": {name: usage_json(run) for name, run in runs.items()},
        "sampling_share": sampling_share(comparison),
        "examination": comparison.examination and comparison.examination.to_dict(),
        "next": next_command(comparison),
    }
