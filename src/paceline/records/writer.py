"""Writes a record so that a kill at any moment leaves a readable account of what was done.

Whole files appear by rename, growing files grow by whole lines; a reader passes over a last line that was cut short.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import RecordError
from paceline.records import schema


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    path: Path

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """Makes the folder, refusing one that already holds a record: results are never overwritten."""
        if cls(path).is_described:
            raise RecordError(f"{path} already holds a record.", hint="name another folder with --out, or remove it")
        try:
            for folder in (path / schema.LOGS_FOLDER, path / schema.ERRORS_FOLDER):
                folder.mkdir(parents=True, exist_ok=True)
                for left_over in folder.glob("rank-*"):  # Of an attempt that came to nothing.
                    left_over.unlink()
        except OSError as error:
            raise RecordError(
                f"cannot write to {path}: {error.strerror}.", hint="name another folder with --out"
            ) from None
        return cls(path)

    @property
    def is_described(self) -> bool:
        """Whether what is known before the first step has been written."""
        return (self.path / schema.RUN_FILE).exists()

    def write_run(self, **sections: Any) -> None:
        """What is known before the first step."""
        write_json(self.path / schema.RUN_FILE, {"schema": schema.SCHEMA_VERSION, **sections})

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """The figures of the whole run."""
        write_json(self.path / schema.SUMMARY_FILE, summary)

    def write_parity(self, parity: Mapping[str, Any]) -> None:
        """How far the strategy's gradients are from one process's."""
        write_json(self.path / schema.PARITY_FILE, parity)

    def mark_finished(self) -> None:
        """Says that the run did all it set out to do."""
        write_json(self.path / schema.FINISHED_FILE, {"time": time.time()})

    def log_file(self, rank: int) -> Path:
        """Where everything a rank prints goes."""
        return self.path / schema.LOGS_FOLDER / f"rank-{rank}.log"

    def error_file(self, rank: int) -> Path:
        """Where a rank that fails says why."""
        return self.path / schema.ERRORS_FOLDER / f"rank-{rank}.json"


class CsvRow(Protocol):
    """A line of a CSV file."""

    def to_csv(self) -> str:
        """The line, with its end."""


class RowWriter:
    """Appends rows to a CSV file, whole lines at a time."""

    def __init__(self, path: Path, header: str) -> None:
        self._file = path.open("w", encoding="ascii", errors="replace")
        self._file.write(header)
        self._file.flush()

    def write(self, rows: Iterable[CsvRow]) -> None:
        """Appends rows and hands them to the operating system, where a kill of this process cannot lose them."""
        self._file.writelines(row.to_csv() for row in rows)
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class StepWriter(RowWriter):
    """Appends one rank's steps."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        super().__init__(folder.path / schema.steps_file(rank), schema.CSV_HEADER)


class ResourceWriter(RowWriter):
    """Appends what one rank's process uses."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        super().__init__(folder.path / schema.resources_file(rank), schema.RESOURCES_HEADER)


class MarkWriter(RowWriter):
    """Appends what happens on one rank beside its steps."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        super().__init__(folder.path / schema.marks_file(rank), schema.MARKS_HEADER)


class EventFolder(Protocol):
    """What events can be written to: a run's folder, or an experiment's."""

    @property
    def path(self) -> Path:
        """Where it is."""


class EventWriter:
    """Appends what happens in a run or an experiment, one JSON object a line."""

    def __init__(self, folder: EventFolder, now: Callable[[], float] | None = None) -> None:
        """`now` tells seconds since the beginning; without it that is this moment."""
        self._file = (folder.path / schema.EVENTS_FILE).open("w", encoding="utf-8")
        start_s = time.perf_counter()
        self._now = now or (lambda: time.perf_counter() - start_s)

    def write(self, event: str, **values: Any) -> None:
        """Appends one event."""
        line = {"event": event, "time_s": round(self._now(), 6), **values}
        self._file.write(json.dumps(strict(line), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def strict(content: Any) -> Any:
    """The content with null for what JSON has no number for: the loss of a run that diverged."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: strict(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [strict(value) for value in content]
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file that is there in full or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(strict(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)
