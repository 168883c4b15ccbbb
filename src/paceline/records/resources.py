"""Reads what a run's processes used, and what happened beside its steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.errors import RecordError
from paceline.records import schema
from paceline.records.reader import is_measured, read_text, whole_lines
from paceline.records.value_checks import LONGEST_S

ALWAYS = ("time_s", "cpu_s", "resident_bytes", "threads", "sampler_s")
"""What is measured on every rank; the rest depends on the device and the host."""


@dataclass(frozen=True)
class Resources:
    """One rank's samples as columns, named as in `ResourceRow`; what was not measured is not a number."""

    columns: dict[str, npt.NDArray[np.float64]]

    def __len__(self) -> int:
        return len(self.columns["time_s"])

    def __getitem__(self, column: str) -> npt.NDArray[np.float64]:
        return self.columns[column]

    def without_drift(self, rate: float) -> Resources:
        """The same by the clock of rank 0, where this rank's went faster by so many seconds a second."""
        return Resources(self.columns | {"time_s": self.columns["time_s"] * (1 - rate)}) if rate else self


def read_resources(file: Path) -> Resources:
    """One rank's samples."""
    header, *lines = whole_lines(read_text(file)) or [schema.RESOURCES_HEADER.strip()]
    names = header.split(",")
    if not set(schema.ResourceRow._fields) <= set(names):
        raise RecordError(f"{file} is damaged: its first line does not name its columns.")
    try:
        rows = [[float(value or "nan") for value in line.split(",")] for line in lines]
        table = np.array(rows, dtype=np.float64).reshape(len(lines), len(names))
    except ValueError:
        raise RecordError(f"{file} is damaged: a line does not hold {len(names)} numbers.") from None
    columns = {name: table[:, index] for index, name in enumerate(names)}
    known = {name: values if name in ALWAYS else values[~np.isnan(values)] for name, values in columns.items()}
    if not all(map(is_measured, known.values())) or (np.abs(columns["time_s"]) >= LONGEST_S).any():
        raise RecordError(f"{file} is damaged: a sample has something that was not measured.")
    return Resources(columns)


def read_marks(file: Path) -> list[schema.MarkRow]:
    """What happened on one rank, in the order in which it ended."""
    _, *lines = whole_lines(read_text(file)) or [""]
    try:
        cells = [line.split(",") for line in lines]
        marks = [schema.MarkRow(kind, float(start), float(end), detail) for kind, start, end, detail in cells]
    except ValueError:
        raise RecordError(f"{file} is damaged: a line is not a mark.") from None
    if not all(-LONGEST_S < mark.start_s <= mark.end_s < LONGEST_S for mark in marks):
        raise RecordError(f"{file} is damaged: a mark has no time, or ends before it starts.")
    return marks
