"""Files of a record that grow while a run trains, and the error for a disk that is full.

Content is appended whole or not at all, so that the record stays readable if there is no space for more of it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.errors import RecordError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_HINT = "free some space, or name a folder on another disk with --out; what was recorded before is kept"


class GrowingFile:
    """File to which bytes are appended without a buffer, so that they survive a kill of this process."""

    def __init__(self, path: Path, *, continued: bool = False) -> None:
        """Open a new file, or with `continued` one to go on with."""
        self._path = path
        with full_disk_error(path):
            self._file = path.open("ab", buffering=0)
            if not continued:
                self._file.truncate(0)
        self._bytes = self._file.tell()

    def append(self, content: bytes) -> None:
        """Append all of the content; raise `RecordError`, with the file as before, if the disk is full."""
        written = 0
        with full_disk_error(self._path):
            try:
                while written < len(content):  # A disk may have space for a part.
                    written += self._file.write(content[written:]) or 0
            except OSError:
                with suppress(OSError):
                    self._file.truncate(self._bytes)
                raise
        self._bytes += written

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@contextmanager
def full_disk_error(path: Path) -> Iterator[None]:
    """Raise `RecordError` in place of an error that means that the disk of a file is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise disk_is_full(path.parent) from None


def disk_is_full(folder: Path) -> RecordError:
    """Return the error for a full disk, or a quota that is used up."""
    return RecordError(f"the disk of {folder} is full: the record could not be written.", hint=_HINT)
