"""A comparison in the terminal: the table, best first, the verdict, and what to do next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.analysis.comparison import Comparison, Row
from paceline.analysis.statistics import Estimate
from paceline.report.verdict import next_command, sentences
from paceline.report.words import factor, number, percent, seconds, size, time_range

ROLES = {"bound": "bound", "baseline": "baseline", "candidate": ""}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """The table and the verdict."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("strategy" if _by_strategy(comparison) else "setting", overflow="fold")
    headings = ["time/step", "95%", _over(comparison.reference), "exposed", "sent/step", "samples/s", "loss"]
    for heading in [*headings, "test loss", "accuracy", "memory"]:
        table.add_column(escape(heading), justify="right", no_wrap=True)
    for row in comparison.rows:
        table.add_row(*cells(row), style="dim" if row.contender.role != "candidate" else None)
    console.print(table)
    for row in comparison.rows:
        if row.failure:
            console.print(f"{row.contender.name} failed: {row.failure}", markup=False, highlight=False, soft_wrap=True)
    console.print()
    for sentence in sentences(comparison):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    for warning in comparison.warnings:
        console.print(f"note: {warning}", markup=False, highlight=False, soft_wrap=True)


def print_next(comparison: Comparison, report: Path | None, console: Console) -> None:
    """Where the report is, and a command that makes sense now."""
    if report:
        console.print(f"report: {report}", markup=False, highlight=False, soft_wrap=True)
    command = next_command(comparison)
    if command:
        console.print(f"next:   {command}", markup=False, highlight=False, soft_wrap=True)


def cells(row: Row) -> list[str]:
    """One row of the table."""
    role = ROLES[row.contender.role]
    name = escape(row.contender.name) + (f" ({role})" if role else "")
    if row.step_s is None:
        return [name, "failed" if row.failure else "–", *["–"] * 9]
    return [
        name,
        seconds(row.step_s.value),
        time_range(row.step_s.low, row.step_s.high, around=row.step_s.value).rpartition(" ")[0] or "–",
        factor(row.ratio.value) if row.ratio else "–",
        _value(row.exposed, lambda value: percent(value, 0)),
        size(row.busiest_sent_bytes),
        _value(row.samples_per_s, lambda value: f"{value:,.0f}"),
        _value(row.train_loss, number),
        _value(row.test_loss, number),
        _value(row.test_accuracy, percent),
        size(row.peak_bytes),
    ]


def _over(reference: str | None) -> str:
    """The heading of the ratios; a long name would push the table off the screen."""
    return f"÷ {reference}" if reference and len(reference) <= 10 else "÷ reference"


def _value(estimate: Estimate | None, write: Callable[[float], str]) -> str:
    return "–" if estimate is None else write(estimate.value)


def _by_strategy(comparison: Comparison) -> bool:
    return len({row.contender.strategy for row in comparison.rows}) > 1 or not comparison.rows[0].contender.settings


def to_json(comparison: Comparison) -> dict[str, Any]:
    """The whole result, for scripts."""
    return {
        "records": comparison.pool.sources,
        "reference": comparison.reference,
        "verdict": sentences(comparison),
        "decision": comparison.decision.to_dict(),
        "interrupted": comparison.interrupted,
        "warnings": comparison.warnings,
        "rows": [row.to_dict() for row in comparison.rows],
        "proofs": [proof.to_dict() for proof in comparison.proofs],
        "partings": [parting.to_dict() for parting in comparison.partings],
        "next": next_command(comparison),
    }
