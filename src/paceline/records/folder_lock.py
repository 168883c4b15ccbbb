"""Lock of a folder with a record: one process at a time writes to it. The kernel releases that of a killed process."""

from __future__ import annotations

from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from paceline.errors import RecordError
from paceline.records import schema


def lock_folder(path: Path, activity: str) -> BaseFileLock:
    """Lock a folder, created if it does not exist, and return the lock, to be released at the end.

    Raise `RecordError` if another process has locked it, and OSError if it cannot be written; `activity` is what the
    error says that the other process does, as in "training".
    """
    path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path / schema.LOCK_FILE)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise RecordError(
            f"another process is {activity} in {path}.", hint="wait for its end, or name another folder with --out"
        ) from None
    return lock
