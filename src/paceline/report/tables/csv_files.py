"""Tables of a comparison as CSV files, with plain numbers: seconds, bytes, shares of one."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.analysis.comparison import Comparison
from paceline.analysis.curves import learning_rate_curve, validation_curve
from paceline.analysis.steps.timing import losses_of
from paceline.analysis.traffic.payload import Payload
from paceline.errors import RecordError
from paceline.report.explanations import explain
from paceline.report.figures.candidates import candidate_csv
from paceline.report.figures.figure import csv_values
from paceline.report.figures.machine import HOST_FIGURES, OPERATOR_FIGURES
from paceline.report.figures.ranks import rank_csv
from paceline.report.figures.steps import BYTES_FIGURES, OPERATION_FIGURES, RANK_BYTES_FIGURES, SPLIT_FIGURES
from paceline.report.tables.payload import payload_rows, rank_bytes_rows
from paceline.report.tables.profile import profile_rows
from paceline.report.tables.resources import host_rows, profiled_runs
from paceline.report.tables.steps import bytes_rows, operation_rows, rank_split_rows, split_rows

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")
"""Characters at which a spreadsheet begins to read a formula."""


def write_tables(comparison: Comparison, folder: Path) -> list[Path]:
    """Write every table into a folder; return the files."""
    tables: dict[str, list[dict[str, Any]]] = {
        "comparison.csv": [candidate_csv(row) for row in comparison.rows],
        "ranks.csv": [rank_csv(row.candidate.name, rank) for row in comparison.rows for rank in row.ranks],
        "splits.csv": [
            {"candidate": row.candidate, "rank": row.rank, **csv_values(SPLIT_FIGURES, row)}
            for row in (*split_rows(comparison), *rank_split_rows(comparison))
        ],
        "bytes.csv": [{"candidate": row.candidate, **csv_values(BYTES_FIGURES, row)} for row in bytes_rows(comparison)],
        "bytes_by_rank.csv": rank_bytes_csv(comparison.payloads),
        "payload.csv": payload_rows(comparison.payloads),
        "operations.csv": [
            {"candidate": row.candidate, "kind": row.traffic.kind, "purpose": row.traffic.purpose}
            | csv_values(OPERATION_FIGURES, row)
            for row in operation_rows(comparison)
        ],
        "hosts.csv": [
            {"candidate": row.candidate, "host": row.usage.host, **csv_values(HOST_FIGURES, row)}
            for row in host_rows(comparison)
        ],
        "operators.csv": [
            {"candidate": name, "operator": row.name, **csv_values(OPERATOR_FIGURES, row)}
            for name, run in profiled_runs(comparison).items()
            for row in profile_rows(run)
        ],
        "reasons.csv": [reason.to_dict() for reason in explain(comparison)],
        "proofs.csv": [asdict(proof) | {"holds": proof.holds} for proof in comparison.proofs],
        "loss_differences.csv": [asdict(loss_difference) for loss_difference in comparison.loss_differences],
        "losses.csv": list(_losses(comparison)),
        "evaluations.csv": list(evaluation_rows(comparison)),
        "learning_rates.csv": list(_learning_rates(comparison)),
    }
    return save_tables(tables, folder)


def save_tables(tables: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path) -> list[Path]:
    """Write the tables that have rows into a folder, by file name; return the files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_write(folder / name, rows) for name, rows in tables.items() if rows]
    except OSError as error:
        raise RecordError(
            f"cannot write to {folder}: {error.strerror}.", hint="choose another folder with --csv"
        ) from None


def rank_bytes_csv(payloads: Mapping[str, Payload]) -> list[dict[str, Any]]:
    """Return the bytes of every rank, with the network interface of its host."""
    return [
        {
            "candidate": row.candidate,
            "rank": row.counted.rank,
            **csv_values(RANK_BYTES_FIGURES, row),
            "interface": row.interface and row.interface.interface,
        }
        for row in rank_bytes_rows(payloads)
    ]


def _losses(comparison: Comparison) -> Iterable[dict[str, Any]]:
    for entry in comparison.record_set.runs:
        for step, loss in enumerate(losses_of(entry.run)):
            yield {"candidate": entry.candidate, "repeat": entry.repeat[1], "step": step, "loss": loss}


def evaluation_rows(comparison: Comparison) -> Iterable[dict[str, Any]]:
    """Yield every evaluation of every run."""
    for entry in comparison.record_set.runs:
        for point in validation_curve(entry.run):
            yield {"candidate": entry.candidate, "repeat": entry.repeat[1], **asdict(point)}


def _learning_rates(comparison: Comparison) -> Iterable[dict[str, Any]]:
    for entry in comparison.record_set.runs:
        curve = learning_rate_curve(entry.run)
        for step, rate in zip(curve.steps, curve.rates, strict=True):
            yield {"candidate": entry.candidate, "repeat": entry.repeat[1], "step": step, "lr": rate}


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return path


def _cell(value: Any) -> Any:
    """Return the value with an apostrophe before text that looks like a formula.

    Names and messages come from users. A spreadsheet shows text after an apostrophe and never evaluates it.
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_STARTS) else value
