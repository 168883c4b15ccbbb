"""Count of the steps that a run has done, in a file that is mapped into memory.

Steps are recorded in windows, so a rank that is killed takes its last ones with it. The mapped file survives it, and a
run that resumes can say exactly how many steps it does again. Only the crash of the whole host may lose the count.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from paceline.records.growing_file import full_disk_error
from paceline.records.schema import STEP_COUNT_FILE

_COUNT = struct.Struct("<Q")


class StepCounter:
    """Counter of rank 0."""

    def __init__(self, folder: Path, done: int) -> None:
        """Begin at the number of steps that the run has done, at its checkpoint."""
        self._done = done
        file = folder / STEP_COUNT_FILE
        with full_disk_error(file):
            file.write_bytes(
                _COUNT.pack(done)
            )  # Not mapped before it has a block on the disk: a full one would kill us.
            with file.open("r+b") as opened:
                self._map = mmap.mmap(opened.fileno(), _COUNT.size)

    def count(self) -> None:
        """Count a step."""
        self._done += 1
        _COUNT.pack_into(self._map, 0, self._done)

    def close(self) -> None:
        """Close the file; may be called more than once."""
        self._map.close()


def read_step_count(folder: Path) -> int:
    """Return the number of steps that the run in a folder has done; 0 if it is not known."""
    try:
        return int(_COUNT.unpack((folder / STEP_COUNT_FILE).read_bytes())[0])
    except (OSError, struct.error):
        return 0
