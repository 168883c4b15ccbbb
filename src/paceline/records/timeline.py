"""When each phase of a step and each operation on the wire began and ended, on one rank: a few dozen bytes each.

A file begins with `MAGIC` and the format's number; then come rows of fixed size, little-endian, as `ROW` has them. A
last row that was cut short is passed over. Times are seconds since the run's start, on the clock of rank 0.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import RecordError
from paceline.records.value_checks import LONGEST_S

MAGIC = b"paceline-timeline"
FORMAT = 1
HEADER = MAGIC + bytes([FORMAT])


class RowKind(enum.IntEnum):
    """What a row is about: the step as a whole, a phase of it, or an operation on the wire."""

    STEP = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    """Until the last gradient is there; what waits after that inside `backward()` is not part of it."""
    OPTIMISER = 4
    ALL_REDUCE = 16
    BROADCAST = 17
    GATHER = 18
    SCATTER = 19
    ALL_GATHER = 20
    REDUCE_SCATTER = 21
    REDUCE = 22
    ALL_TO_ALL = 23
    SEND = 24
    RECV = 25
    BARRIER = 26
    SHARED_REDUCE = 27
    """An all_reduce through memory that the ranks of a host share: nothing of it is on the wire."""

    @property
    def is_operation(self) -> bool:
        """Whether it is something on the wire."""
        return self >= RowKind.ALL_REDUCE

    @property
    def title(self) -> str:
        """What a person calls it."""
        return self.name.lower()


class Purpose(enum.IntEnum):
    """What an operation carries."""

    NOTHING = 0
    """For phases."""
    GRADIENTS = 1
    BUFFERS = 2
    """Running statistics of BatchNorm and the like, broadcast before a step."""
    STATISTICS = 3
    """Of the global batch, under `--bn sync`."""
    WEIGHTS = 4
    AGREEMENT = 5
    """Small figures that the ranks tell each other: whether all have a next batch, a mean over them."""

    @property
    def title(self) -> str:
        """What a person calls it."""
        return self.name.lower()


ROW = np.dtype(
    [
        ("step", "<u4"),
        ("kind", "u1"),
        ("purpose", "u1"),
        ("peer", "<i2"),
        ("bytes", "<u8"),
        ("start_s", "<f8"),
        ("end_s", "<f8"),
        ("waited_from_s", "<f8"),
        ("cpu_s", "<f8"),
    ]
)
"""`peer`: root, sender or receiver, -1 where there is none. `bytes`: of the whole tensor, over all ranks for gather,
scatter, all_gather and reduce_scatter. `waited_from_s`: since when the computing thread did nothing but wait for the
operation's end; not a number where it never did. `cpu_s`: processor time that the computing thread got in a phase; not
a number where that is not known."""

WHOLE, IN_A_ROW = 1000, 100
"""Steps that are all kept, and how many are in a row after them."""

_PACK = struct.Struct("<IBBhQdddd").pack

NO_PEER = -1
NEVER = float("nan")


@dataclass(frozen=True)
class Timeline:
    """One rank's rows, in the order of their start."""

    rows: npt.NDArray[np.void]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def steps(self) -> npt.NDArray[np.void]:
        """One row per step that was kept."""
        return self.of(RowKind.STEP)

    @property
    def operations(self) -> npt.NDArray[np.void]:
        """What was on the wire."""
        return self.rows[self.rows["kind"] >= RowKind.ALL_REDUCE]

    def of(self, *kinds: RowKind) -> npt.NDArray[np.void]:
        """The rows of some kinds."""
        return self.rows[np.isin(self.rows["kind"], kinds)]

    def without_drift(self, rate: float) -> Timeline:
        """The same by the clock of rank 0, where this rank's went faster by so many seconds a second."""
        if not rate:
            return self
        rows = self.rows.copy()
        for time in ("start_s", "end_s", "waited_from_s"):
            rows[time] *= 1 - rate
        return Timeline(rows)


def timeline_file(rank: int) -> str:
    """The file of one rank's timeline."""
    return f"timeline-{rank}.bin"


def keeps(step: int) -> bool:
    """Whether a step is kept: all of the first thousand, then a tenth, then a hundredth, so that files stay small.

    A hundred in a row each time: one here and there would miss, or see nothing but, the steps of a strategy that sends
    something every so often.
    """
    return step < WHOLE or step % int(10 ** (len(str(step)) - 1)) < IN_A_ROW


class TimelineWriter:
    """Appends one rank's rows."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / timeline_file(rank)).open("wb", buffering=0)
        self._file.write(HEADER)

    def write(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Appends rows, each with the fields of `ROW`."""
        if rows:
            self._file.write(b"".join([_PACK(*row) for row in rows]))  # In half of the time that numpy takes.

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_timeline(file: Path, ranks: int | None = None) -> Timeline:
    """One rank's timeline, also of a run that is still going on; `ranks` is how many the run has, where that is known.

    What it holds is checked: readers look peers up, and turn times into whole numbers.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise RecordError(f"{file} cannot be read: {error.strerror}.") from None
    if not content.startswith(MAGIC):
        raise RecordError(f"{file} is damaged: it is not a timeline.")
    if not content.startswith(HEADER):
        raise RecordError(f"{file} is a timeline of another version.", hint="read it with the version that wrote it")
    whole = (len(content) - len(HEADER)) // ROW.itemsize
    rows = np.frombuffer(content, dtype=ROW, count=whole, offset=len(HEADER))
    known = np.isin(rows["kind"], list(RowKind)) & np.isin(rows["purpose"], list(Purpose))
    in_order = (rows["start_s"] > -LONGEST_S) & (rows["start_s"] <= rows["end_s"]) & (rows["end_s"] < LONGEST_S)
    lasts = (rows["kind"] != RowKind.STEP) | (rows["start_s"] < rows["end_s"])
    if not (known & in_order & lasts).all():
        raise RecordError(f"{file} is damaged: a row is of no known kind, or does not end after it starts.")
    if any((np.abs(rows[name]) >= LONGEST_S).any() for name in ("waited_from_s", "cpu_s")):
        raise RecordError(f"{file} is damaged: a row has a time that cannot be.")
    if (rows["peer"] < NO_PEER).any() or (ranks is not None and (rows["peer"] >= ranks).any()):
        raise RecordError(f"{file} is damaged: an operation is with a rank that the run did not have.")
    return Timeline(rows[np.argsort(rows["start_s"], kind="stable")])
