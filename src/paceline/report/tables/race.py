"""CSV files of a race."""

from __future__ import annotations

from pathlib import Path

from paceline.analysis.race.race import Race
from paceline.report.figures.race import race_run_csv
from paceline.report.tables.csv_files import evaluation_rows, save_tables


def write_race_tables(race: Race, folder: Path) -> list[Path]:
    """Write the runs and their evaluations as CSV files into a folder; return the files."""
    tables = {
        "race.csv": [race_run_csv(run) for run in race.runs],
        "evaluations.csv": list(evaluation_rows(race.comparison)),
    }
    return save_tables(tables, folder)
