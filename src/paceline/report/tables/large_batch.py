"""CSV files of an experiment with large batches."""

from __future__ import annotations

from pathlib import Path

from paceline.analysis.large_batch.results import LargeBatches
from paceline.report.figures.large_batch import large_batch_csv
from paceline.report.tables.csv_files import evaluation_rows, save_tables


def write_large_batch_tables(found: LargeBatches, folder: Path) -> list[Path]:
    """Write the candidates and their evaluations as CSV files into a folder; return the files."""
    tables = {
        "large_batch.csv": [large_batch_csv(row) for row in found.rows],
        "evaluations.csv": list(evaluation_rows(found.comparison)),
    }
    return save_tables(tables, folder)
