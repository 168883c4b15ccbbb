"""Find records in the folders that a user names: an experiment, a run, or a folder that contains records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import RecordError
from paceline.records.decoder import exists
from paceline.records.examination import has_examination
from paceline.records.experiment.design import is_experiment, read_description
from paceline.records.experiment.record import ExperimentRecord, read_experiment
from paceline.records.reader import RunRecord, read_usable_run
from paceline.records.schema import EXPERIMENT_FILE, RUN_FILE

Record = ExperimentRecord | RunRecord


def find_records(folders: Sequence[Path]) -> tuple[list[Record], list[str]]:
    """Return the records in these folders, in order and without duplicates, and a sentence on each damaged one.

    Raises `RecordError` if a folder contains no record, or if all records are damaged.
    """
    found: dict[Path, Record] = {}
    damaged: list[RecordError] = []
    for folder in folders:
        if not folder.is_dir():
            raise RecordError(f"{folder} is not a folder.", hint="name the folder of a run or of an experiment")
        if holds_examination(folder):
            raise RecordError(
                f"{folder} contains an examination by `paceline doctor` and no run to compare.",
                hint=f"show it with `paceline report {folder}`, without other folders",
            )
        record_folders = [folder] if _holds_record(folder) else _records_inside(folder)
        if not record_folders:
            raise RecordError(
                f"{folder} contains no record.",
                hint="name the folder of a run or of an experiment, such as one under runs/",
            )
        for record_folder in record_folders:
            try:
                found[record_folder.resolve()] = _read_record(record_folder)
            except RecordError as error:
                damaged.append(error)
    if damaged and not found:
        raise damaged[0]
    warnings = [f"{error.message} The report omits this record." for error in damaged]
    return list(found.values()), warnings


def find_experiments(folder: Path, kind: str) -> tuple[list[ExperimentRecord], list[str]]:
    """Return the experiments of one kind in a folder and all its subfolders, and a sentence on each damaged one."""
    if not folder.is_dir():
        raise RecordError(f"{folder} is not a folder.", hint="name a folder that contains experiments, such as runs/")
    found: list[ExperimentRecord] = []
    warnings: list[str] = []
    for file in sorted(folder.rglob(EXPERIMENT_FILE)):
        try:
            if read_description(file).kind == kind:
                found.append(read_experiment(file.parent))
        except RecordError as error:
            warnings.append(f"{error.message} It is left out.")
    return found, warnings


def holds_examination(folder: Path) -> bool:
    """Return whether a folder contains only an examination, and no run or experiment."""
    return has_examination(folder) and not _holds_record(folder)


def _holds_record(folder: Path) -> bool:
    return is_experiment(folder) or exists(folder / RUN_FILE)


def _records_inside(folder: Path) -> list[Path]:
    """Return the folders of records inside a folder."""
    try:
        return [path for path in sorted(folder.iterdir()) if path.is_dir() and _holds_record(path)]
    except OSError as error:
        raise RecordError(f"{folder} cannot be read: {error.strerror}.") from None


def _read_record(folder: Path) -> Record:
    return read_experiment(folder) if is_experiment(folder) else read_usable_run(folder)
