"""Find records in the folders that a user names: an experiment, a run, or a folder that contains records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import RecordError
from paceline.records.examination import has_examination
from paceline.records.experiment import ExperimentRecord, is_experiment, read_experiment
from paceline.records.reader import RunRecord, read_run
from paceline.records.schema import RUN_FILE

Record = ExperimentRecord | RunRecord


def find_records(folders: Sequence[Path]) -> list[Record]:
    """Return the records in these folders, in order and without duplicates.

    Raises `RecordError` if a folder contains no record.
    """
    found: dict[Path, Record] = {}
    for folder in folders:
        if not folder.is_dir():
            raise RecordError(f"{folder} is not a folder.", hint="name the folder of a run or of an experiment")
        record = _record_in(folder)
        if holds_examination(folder):
            raise RecordError(
                f"{folder} contains an examination by `paceline doctor` and no run to compare.",
                hint=f"show it with `paceline report {folder}`, without other folders",
            )
        records = _records_inside(folder) if record is None else [record]
        if not records:
            raise RecordError(
                f"{folder} contains no record.",
                hint="name the folder of a run or of an experiment, such as one under runs/",
            )
        found |= {record.path.resolve(): record for record in records}
    return list(found.values())


def holds_examination(folder: Path) -> bool:
    """Return whether a folder contains only an examination, and no run or experiment."""
    return has_examination(folder) and not is_experiment(folder) and not (folder / RUN_FILE).is_file()


def _records_inside(folder: Path) -> list[Record]:
    records = [_record_in(path) for path in sorted(folder.iterdir()) if path.is_dir()]
    return [record for record in records if record is not None]


def _record_in(folder: Path) -> Record | None:
    if is_experiment(folder):
        return read_experiment(folder)
    return read_run(folder) if (folder / RUN_FILE).is_file() else None
