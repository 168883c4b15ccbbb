"""Write a record so that it stays readable if the process is killed at any time.

Complete files are written by rename, and growing files grow by whole lines; readers ignore a truncated last line.
"""

from __future__ import annotations

import itertools
import math
import numbers
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from paceline.errors import RecordError
from paceline.records import schema
from paceline.records.atomic_file import atomic_file
from paceline.records.description import RunDescription
from paceline.records.events import Event
from paceline.records.folder_lock import lock_folder
from paceline.records.growing_file import GrowingFile, full_disk_error
from paceline.records.parity import Parity
from paceline.records.summary import Summary


@dataclass(frozen=True)
class RunFolder:
    """Folder of one run."""

    path: Path

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """Create the folder; raise `RecordError` if it contains a record: results are never overwritten."""
        if cls(path).has_run_file:
            raise RecordError(
                f"{path} already contains a record.", hint="name another folder with --out, or remove this one"
            )
        try:
            for folder in (path / schema.LOGS_FOLDER, path / schema.ERRORS_FOLDER):
                folder.mkdir(parents=True, exist_ok=True)
                for left_over in folder.glob("rank-*"):  # From an attempt that failed before the first step.
                    left_over.unlink()
        except OSError as error:
            raise unwritable(path, error) from None
        return cls(path)

    @classmethod
    def open(cls, path: Path, resume: Path) -> RunFolder:
        """Return the folder of a run that resumes from a checkpoint, or from a folder of them.

        It is created if it does not exist. Raise `RecordError` if it contains the record of another run.
        """
        if cls(path).has_record and not resume.resolve().is_relative_to(path.resolve()):
            other = resume.parent if resume.name == schema.CHECKPOINTS_FOLDER else resume
            raise RecordError(
                f"{path} already contains the record of another run than {other}.",
                hint=f"name another folder with --out; to go on with the run in {path} itself, use --resume latest",
            )
        try:
            for folder in (path / schema.LOGS_FOLDER, path / schema.ERRORS_FOLDER):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(path, error) from None
        return cls(path)

    @classmethod
    @contextmanager
    def locked(cls, path: Path) -> Iterator[None]:
        """Lock the folder, created if it does not exist, for the duration of a `with` block.

        Raise `RecordError` if another process trains in it. The kernel releases the lock of a process that is killed.
        """
        try:
            lock = lock_folder(path, "training")
        except OSError as error:
            raise unwritable(path, error) from None
        try:
            yield
        finally:
            lock.release()

    def next_attempt(self) -> RunFolder:
        """Create the folder for the logs and error files of ranks that go on with this run.

        They are apart from those of earlier ranks, of which one may still write its error.
        """
        numbers = itertools.count(2)
        return RunFolder.create(
            next(path for number in numbers if not (path := self.path / schema.attempt_folder(number)).exists())
        )

    @property
    def has_run_file(self) -> bool:
        """Whether `run.json` has been written."""
        return (self.path / schema.RUN_FILE).exists()

    @property
    def has_record(self) -> bool:
        """Whether a run has begun a record here; `run.json` is set aside for a moment when it resumes."""
        return self.has_run_file or (self.path / schema.EVENTS_FILE).exists()

    def write_run(self, description: RunDescription) -> None:
        """Write `run.json`, with everything known before the first step."""
        write_json(self.path / schema.RUN_FILE, description)

    def write_summary(self, summary: Summary) -> None:
        """Write the results of the whole run."""
        write_json(self.path / schema.SUMMARY_FILE, summary)

    def write_parity(self, parity: Parity) -> None:
        """Write the result of a parity proof."""
        write_json(self.path / schema.PARITY_FILE, parity)

    def mark_ready(self) -> None:
        """Mark the ranks of a launch as connected."""
        write_json(self.path / schema.READY_FILE, {"time": time.time()})

    def mark_finished(self) -> None:
        """Mark the run as completed."""
        write_json(self.path / schema.FINISHED_FILE, {"time": time.time()})

    def log_file(self, rank: int) -> Path:
        """Return the path of the file for everything that a rank prints."""
        return self.path / schema.LOGS_FOLDER / f"rank-{rank}.log"

    def error_file(self, rank: int) -> Path:
        """Return the path of the file to which a failed rank writes its error."""
        return self.path / schema.ERRORS_FOLDER / f"rank-{rank}.json"


def unwritable(path: Path, error: OSError) -> RecordError:
    """Return the error for a folder that cannot be written to."""
    return RecordError(f"cannot write to {path}: {error.strerror}.", hint="name another folder with --out")


class CsvRow(Protocol):
    """A row that can be written to a CSV file."""

    def to_csv(self) -> str:
        """Return the line, including the line break."""


class RowWriter:
    """Writer that appends whole lines to a CSV file."""

    def __init__(self, path: Path, header: str) -> None:
        self._file = GrowingFile(path)
        self._file.append(header.encode("ascii"))

    def write(self, rows: Iterable[CsvRow]) -> None:
        """Append rows."""
        self._file.append("".join([row.to_csv() for row in rows]).encode("ascii", "replace"))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class StepWriter(RowWriter):
    """Writer of one rank's steps."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        super().__init__(folder.path / schema.steps_file(rank), schema.CSV_HEADER)


class ResourceWriter(RowWriter):
    """Writer of the CPU and memory samples of one rank's process."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        super().__init__(folder.path / schema.resources_file(rank), schema.RESOURCES_HEADER)


class MarkWriter(RowWriter):
    """Writer of one rank's evaluations, epoch ends and garbage collections."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        super().__init__(folder.path / schema.marks_file(rank), schema.MARKS_HEADER)


class EventFolder(Protocol):
    """Folder of a run or of an experiment, which events can be written to."""

    @property
    def path(self) -> Path:
        """Path of the folder."""


class EventWriter:
    """Writer of the events of a run or an experiment, one JSON object per line."""

    def __init__(
        self, folder: EventFolder, now: Callable[[], float] | None = None, *, continued_s: float | None = None
    ) -> None:
        """Open the file. `now` returns seconds since the start; by default, time starts at this call.

        With `continued_s`, the events of the file are kept, and time continues from there.
        """
        file = folder.path / schema.EVENTS_FILE
        if continued_s is not None and file.is_file():
            content = file.read_bytes()
            os.truncate(file, content.rfind(b"\n") + 1)  # A process that is killed may leave part of a line.
        self._file = GrowingFile(file, continued=continued_s is not None)
        start_s = time.perf_counter() - (continued_s or 0.0)
        self._now = now or (lambda: time.perf_counter() - start_s)

    def write(self, event: Event) -> None:
        """Append one event, with the time of this call."""
        self._file.append(encode(msgspec.structs.replace(event, time_s=round(self._now(), 6))) + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def json_safe(content: Any) -> Any:
    """Return the content as JSON values, with None for NaN and infinity, which JSON cannot represent."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, msgspec.Struct):
        content = msgspec.structs.asdict(content)
    if isinstance(content, Mapping):
        return {key: json_safe(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [json_safe(value) for value in content]
    return content


def write_json(path: Path, content: msgspec.Struct | Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    with full_disk_error(path), atomic_file(path) as temporary:
        temporary.write_bytes(msgspec.json.format(encode(content), indent=2) + b"\n")


def encode(content: Any) -> bytes:
    """Encode a model or other values as JSON. NaN and infinity become null, as in `json_safe`."""
    try:
        return msgspec.json.encode(content, enc_hook=_plain_number)
    except UnicodeEncodeError:  # A path or an argument on the command line may not be valid Unicode.
        return msgspec.json.encode(_encodable(msgspec.to_builtins(content, enc_hook=_plain_number)))


def _plain_number(value: Any) -> float | int:
    """Return a number of a type that JSON does not know, such as numpy's or a tensor's, as a plain one."""
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, numbers.Integral):
        return int(plain)
    if isinstance(plain, numbers.Real):
        return float(plain)
    raise TypeError(f"{type(value).__name__} cannot be written to a record.")


def _encodable(content: Any) -> Any:
    """Return the content with question marks for lone surrogates, which UTF-8 cannot represent."""
    if isinstance(content, str):
        return content.encode("utf-8", "replace").decode()
    if isinstance(content, Mapping):
        return {_encodable(key): _encodable(value) for key, value in content.items()}
    return [_encodable(value) for value in content] if isinstance(content, list) else content
