"""CSV files of a scaling experiment."""

from __future__ import annotations

from pathlib import Path

from paceline.analysis.scaling.curves import Scaling
from paceline.report.figures.points import point_csv
from paceline.report.tables.csv_files import rank_bytes_csv, save_tables
from paceline.report.tables.payload import payload_rows


def write_scaling_tables(scaling: Scaling, folder: Path) -> list[Path]:
    """Write the tables as CSV files, with plain numbers, into a folder; return the files."""
    rows = [point_csv(point) for mode in scaling.modes for point in scaling.points(mode)]
    comparison = scaling.comparison
    tables = {
        "scaling.csv": rows,
        "bytes_by_rank.csv": rank_bytes_csv(comparison.payloads),
        "payload.csv": payload_rows(comparison.payloads),
        "proofs.csv": [proof.to_dict() for proof in comparison.proofs],
    }
    return save_tables(tables, folder)
