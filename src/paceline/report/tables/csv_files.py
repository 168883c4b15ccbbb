"""The tables of a comparison as CSV files, with plain numbers: seconds, bytes, shares of one."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.analysis.comparison import CandidateRow, Comparison
from paceline.analysis.statistics import Estimate
from paceline.analysis.steps.timing import losses_of
from paceline.errors import RecordError
from paceline.report.explanations import explain
from paceline.report.tables.payload import payload_rows, rank_bytes_rows
from paceline.report.tables.resources import host_rows
from paceline.report.tables.steps import bytes_rows, operation_rows, rank_split_rows, split_rows

ESTIMATES = ("step_s", "samples_per_s", "ratio", "exposed", "above_bound", "train_loss", "test_loss", "test_accuracy")
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")
"""What a spreadsheet takes for the beginning of a formula."""
PLAIN = ("busiest_sent_bytes", "imbalance", "peak_bytes", "workers", "batch", "failure")


def write_tables(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes every table into a folder; returns the files."""
    tables: dict[str, list[dict[str, Any]]] = {
        "comparison.csv": [_row(row) for row in comparison.rows],
        "ranks.csv": [
            {"candidate": row.candidate.name, **asdict(rank)} for row in comparison.rows for rank in row.ranks
        ],
        "splits.csv": [asdict(row) for row in (*split_rows(comparison), *rank_split_rows(comparison))],
        "bytes.csv": [asdict(row) for row in bytes_rows(comparison)],
        "bytes_by_rank.csv": [asdict(row) for row in rank_bytes_rows(comparison.payloads)],
        "payload.csv": payload_rows(comparison.payloads),
        "operations.csv": [asdict(row) for row in operation_rows(comparison)],
        "hosts.csv": [asdict(row) for row in host_rows(comparison)],
        "reasons.csv": [reason.to_dict() for reason in explain(comparison)],
        "proofs.csv": [asdict(proof) | {"holds": proof.holds} for proof in comparison.proofs],
        "loss_differences.csv": [asdict(loss_difference) for loss_difference in comparison.loss_differences],
        "losses.csv": list(_losses(comparison)),
    }
    return save_tables(tables, folder)


def save_tables(tables: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path) -> list[Path]:
    """Writes those tables that have rows into a folder, by the names of their files; returns the files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_write(folder / name, rows) for name, rows in tables.items() if rows]
    except OSError as error:
        raise RecordError(
            f"cannot write to {folder}: {error.strerror}.", hint="name another folder with --csv"
        ) from None


def _row(row: CandidateRow) -> dict[str, Any]:
    values: dict[str, Any] = {"candidate": row.candidate.name, "strategy": row.candidate.strategy}
    values |= {"role": row.candidate.role, "lossless": row.candidate.lossless, "repeats": row.repeats}
    for name in ESTIMATES:
        estimate: Estimate | None = getattr(row, name)
        values[name] = None if estimate is None else estimate.value
        values[f"{name}_low"] = None if estimate is None else estimate.low
        values[f"{name}_high"] = None if estimate is None else estimate.high
    return values | {name: getattr(row, name) for name in PLAIN}


def _losses(comparison: Comparison) -> Iterable[dict[str, Any]]:
    for entry in comparison.record_set.runs:
        for step, loss in enumerate(losses_of(entry.run)):
            yield {"candidate": entry.candidate, "repeat": entry.repeat[1], "step": step, "loss": loss}


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return path


def _cell(value: Any) -> Any:
    """Names and messages come from elsewhere: a spreadsheet shows text behind an apostrophe and never computes it."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_STARTS) else value
