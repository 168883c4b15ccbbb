"""CSV files of an experiment over batch sizes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.analysis.batch.points import BatchSizes
from paceline.analysis.batch.progress import progress_curve
from paceline.report.figures.batch import batch_point_csv
from paceline.report.tables.csv_files import evaluation_rows, save_tables


def write_batch_tables(found: BatchSizes, folder: Path) -> list[Path]:
    """Write the tables as CSV files, with plain numbers, into a folder; return the files."""
    tables = {
        "batch_sizes.csv": [batch_point_csv(point) for point in found.points],
        "training_curves.csv": list(_curves(found)),
        "evaluations.csv": list(evaluation_rows(found.comparison)),
        "proofs.csv": [proof.to_dict() for proof in found.comparison.proofs],
    }
    return save_tables(tables, folder)


def _curves(found: BatchSizes) -> Iterator[dict[str, Any]]:
    """Yield the training loss and accuracy of every window of every run."""
    for point in found.points:
        for (_, repeat), run in found.record_set.runs_of(point.candidate.name).items():
            about = {"strategy": point.strategy, "ranks": point.ranks, "batch": point.batch, "repeat": repeat}
            for own in progress_curve(run):
                values = {"step": own.step, "wall_s": own.wall_s, "loss": own.loss, "accuracy": own.accuracy}
                yield about | values
