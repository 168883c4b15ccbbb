"""Read the CPU and memory samples of a run's processes, and the marks of events other than steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.errors import RecordError
from paceline.records import schema
from paceline.records.reader import is_measured, read_text, whole_lines
from paceline.records.value_types import MAX_TIME_S

ALWAYS = ("time_s", "cpu_s", "resident_bytes", "threads", "sampler_cpu_s")
"""Columns that every rank measures; the others depend on the device and the host."""


@dataclass(frozen=True)
class Resources:
    """One rank's samples as columns, named as in `ResourceRow`; values that were not measured are NaN."""

    columns: dict[str, npt.NDArray[np.float64]]

    def __len__(self) -> int:
        return len(self.columns["time_s"])

    def __getitem__(self, column: str) -> npt.NDArray[np.float64]:
        return self.columns[column]

    def without_drift(self, rate: float) -> Resources:
        """Return the samples on rank 0's clock; `rate` is this rank's drift in seconds per second."""
        return Resources(self.columns | {"time_s": self.columns["time_s"] * (1 - rate)}) if rate else self


def read_resources(file: Path) -> Resources:
    """Read one rank's samples."""
    header, *lines = whole_lines(read_text(file)) or [schema.RESOURCES_HEADER.strip()]
    names = header.split(",")
    added = schema.ResourceRow._field_defaults.keys()
    if not set(schema.ResourceRow._fields) <= {*names, *added}:
        raise RecordError(f"{file} is damaged: the header line lacks columns.")
    try:
        rows = [[float(value or "nan") for value in line.split(",")] for line in lines]
        table = np.array(rows, dtype=np.float64).reshape(len(lines), len(names))
    except ValueError:
        raise RecordError(f"{file} is damaged: a line does not contain {len(names)} numbers.") from None
    columns = {name: np.full(len(lines), np.nan) for name in added}
    columns |= {name: table[:, index] for index, name in enumerate(names)}
    known = {name: values if name in ALWAYS else values[~np.isnan(values)] for name, values in columns.items()}
    if not all(map(is_measured, known.values())) or (np.abs(columns["time_s"]) >= MAX_TIME_S).any():
        raise RecordError(f"{file} is damaged: a sample has a value that is missing or out of range.")
    return Resources(columns)


def read_marks(file: Path) -> list[schema.MarkRow]:
    """Read one rank's marks, ordered by their end."""
    header, *lines = whole_lines(read_text(file)) or [schema.MARKS_HEADER.strip()]
    if header != schema.MARKS_HEADER.strip():
        raise RecordError(f"{file} is damaged: the header line lacks columns.")
    try:
        cells = [line.split(",") for line in lines]
        marks = [schema.MarkRow(kind, float(start), float(end), detail) for kind, start, end, detail in cells]
    except ValueError:
        raise RecordError(f"{file} is damaged: a line is not a mark.") from None
    if not all(-MAX_TIME_S < mark.start_s <= mark.end_s < MAX_TIME_S for mark in marks):
        raise RecordError(f"{file} is damaged: a mark ends before it starts, or its time is out of range.")
    return marks
