"""Terminal output of a comparison: the table, best first, the verdict, and the next command; the same as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.analysis.other_load import other_load
from paceline.report.explanations import explain
from paceline.report.figures.candidates import CANDIDATE_FIGURES
from paceline.report.figures.columns import Column, terminal_columns, text_column
from paceline.report.run_description import compares_strategies, outcome
from paceline.report.tables.json_rows import (
    evaluations_json,
    operators_json,
    payloads_json,
    rows_json,
    usage_json,
    wires_json,
)
from paceline.report.tables.resources import comparing_replicas_share, first_runs, profiled_runs, sampling_share
from paceline.report.terminal.lines import print_line
from paceline.report.terminal.table import figure_table
from paceline.report.verdict.headline import remark_on
from paceline.report.verdict.next_command import next_command
from paceline.report.verdict.sentences import sentences

ROLES = {"bound": "bound", "baseline": "baseline", "candidate": ""}
LONGEST_REFERENCE = 10
"""Longest name of the reference that the heading of the ratios shows; a longer one would make the table too wide."""


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the table and the verdict."""
    styles = [None if row.candidate.role == "candidate" and not row.failure else "dim" for row in comparison.rows]
    console.print(figure_table(_columns(comparison), console.width, styles=styles, name_width=12))
    for row in comparison.rows:
        if row.failure:
            print_line(console, f"{row.candidate.name} failed: {row.failure}")
    console.print()
    for sentence in sentences(comparison):
        print_line(console, sentence)
    for warning in comparison.warnings:
        print_line(console, f"note: {warning}")


def _columns(comparison: Comparison) -> list[Column]:
    rows, reference = comparison.rows, comparison.reference
    names = text_column("strategy" if compares_strategies(comparison) else "setting", [_name(row) for row in rows])
    fits = reference is not None and len(reference) <= LONGEST_REFERENCE
    return [names, *terminal_columns(CANDIDATE_FIGURES, rows, {"ratio": f"÷ {reference}"} if fits else {})]


def _name(row: CandidateRow) -> str:
    remark = outcome(row) or ROLES[row.candidate.role] or remark_on(row)
    return row.candidate.name + (f" ({remark})" if remark else "")


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return the whole result as JSON data.

    Resources are those of the first repeat, operators those of the first that was profiled.
    """
    load = other_load(comparison.record_set)
    return {
        "records": comparison.record_set.sources,
        "reference": comparison.reference,
        "verdict": sentences(comparison),
        "pick": comparison.pick,
        "learning": None if comparison.learning is None else comparison.learning.to_dict(),
        "decision": comparison.decision.to_dict(),
        "alternatives": [alternative.to_dict() for alternative in comparison.alternatives],
        "interrupted": comparison.interrupted,
        "warnings": comparison.warnings,
        "other_load": None if load is None else asdict(load),
        "rows": rows_json(comparison),
        "proofs": [proof.to_dict() for proof in comparison.proofs],
        "loss_differences": [loss_difference.to_dict() for loss_difference in comparison.loss_differences],
        "why": [reason.to_dict() for reason in explain(comparison)],
        "wire": wires_json(comparison),
        "payload": payloads_json(comparison.payloads),
        "evaluations": {
            row.candidate.name: [
                {"repeat": recorded.repeat[1], "points": evaluations_json(recorded.run)}
                for recorded in comparison.record_set.recorded_runs_of(row.candidate.name)
            ]
            for row in comparison.rows
        },
        "operators": {name: operators_json(run) for name, run in profiled_runs(comparison).items()},
        "resources": {name: usage_json(run) for name, run in first_runs(comparison).items()},
        "sampling_share": sampling_share(comparison),
        "comparing_replicas_share": comparing_replicas_share(comparison),
        "examination": comparison.examination and comparison.examination.to_dict(),
        "next": next_command(comparison),
    }
