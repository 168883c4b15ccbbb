"""Timeline of one rank: start and end of each phase of a step and of each communication operation.

A file begins with `MAGIC` and the format number. Rows of fixed size follow, little-endian, with the fields of `ROW`. A
truncated last row is ignored. Times are seconds since the start of the run, on the clock of rank 0.
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
from paceline.records.decoder import read_bytes
from paceline.records.growing_file import GrowingFile
from paceline.records.value_types import MAX_TIME_S

MAGIC = b"paceline-timeline"
FORMAT = 1
HEADER = MAGIC + bytes([FORMAT])


class RowKind(enum.IntEnum):
    """Kind of a row: a whole step, a phase of a step, or a communication operation."""

    STEP = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    """Ends when the last gradient is computed; later waits inside `backward()` are not part of it."""
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
    """An all-reduce through memory shared by the ranks of a host: it sends nothing over the network."""

    @property
    def is_operation(self) -> bool:
        """Whether the row is a communication operation."""
        return self >= RowKind.ALL_REDUCE

    @property
    def title(self) -> str:
        """Name of the kind in tables."""
        return self.name.lower()


MESSAGES = (RowKind.SEND, RowKind.RECV)
"""Operations between two ranks; all others are collectives."""


class Purpose(enum.IntEnum):
    """Content of an operation."""

    NOTHING = 0
    """Value for rows that are not operations."""
    GRADIENTS = 1
    BUFFERS = 2
    """Running statistics of BatchNorm and other buffers, broadcast before a step."""
    STATISTICS = 3
    """BatchNorm statistics of the global batch, under `--bn sync`."""
    WEIGHTS = 4
    CONTROL = 5
    """Small values that ranks exchange for the training loop, such as whether every rank has another batch."""

    @property
    def title(self) -> str:
        """Name of the purpose in tables."""
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
        ("wait_start_s", "<f8"),
        ("cpu_s", "<f8"),
    ]
)
"""Fields of a row.

`peer`: root, sender or receiver; -1 if there is none. `bytes`: size of the whole tensor; the sum over ranks for gather,
scatter, all_gather and reduce_scatter. `wait_start_s`: time from which the compute thread only waited for the operation
to end; NaN if it never waited. `cpu_s`: CPU time of the compute thread in a phase; NaN if unknown."""

SAMPLED_BLOCK = 10
"""Fewest consecutive steps that a sampled timeline records."""

_PACK = struct.Struct("<IBBhQdddd").pack

NO_PEER = -1
NOT_MEASURED = float("nan")


@dataclass(frozen=True)
class Timeline:
    """One rank's rows, ordered by start time."""

    rows: npt.NDArray[np.void]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def steps(self) -> npt.NDArray[np.void]:
        """One row per recorded step."""
        return self.of(RowKind.STEP)

    @property
    def operations(self) -> npt.NDArray[np.void]:
        """Rows of communication operations."""
        return self.rows[self.rows["kind"] >= RowKind.ALL_REDUCE]

    def of(self, *kinds: RowKind) -> npt.NDArray[np.void]:
        """Return the rows of the given kinds."""
        return self.rows[np.isin(self.rows["kind"], kinds)]

    def without_drift(self, rate: float) -> Timeline:
        """Return the timeline on rank 0's clock; `rate` is this rank's drift in seconds per second."""
        if not rate:
            return self
        rows = self.rows.copy()
        for time in ("start_s", "end_s", "wait_start_s"):
            rows[time] *= 1 - rate
        return Timeline(rows)


def timeline_file(rank: int) -> str:
    """Return the name of the file with one rank's timeline."""
    return f"timeline-{rank}.bin"


@dataclass(frozen=True)
class RecordedSteps:
    """Rule that says which steps a timeline contains: the first ones, and later blocks of consecutive steps.

    After the first steps, one block in 10 is recorded, from step 10,000 on one in 100, and so on, to keep files small.
    Single steps at a fixed stride could miss, or hit exclusively, the steps in which a strategy with periodic
    communication sends.
    """

    first: int = 1000
    """Number of first steps that are all recorded."""
    block: int = 100

    @property
    def cycle(self) -> int:
        """Steps after which the pattern repeats, up to step 10,000."""
        return 10 * self.block

    def __contains__(self, step: int) -> bool:
        if step < self.first:
            return True
        stride: int = self.cycle * 10 ** max(0, len(str(step)) - 4)
        return step % stride < self.block


def sampled_steps(period: int = 1) -> RecordedSteps:
    """Return the rule for steps whose recording is expensive: one in 10, in blocks of whole periods of a strategy.

    The first two blocks are recorded, so that a short run has steps after the warm-up.
    """
    block = -(-SAMPLED_BLOCK // period) * period
    return RecordedSteps(first=2 * block, block=block)


class TimelineWriter:
    """Writer that appends one rank's rows."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = GrowingFile(folder / timeline_file(rank))
        self._file.append(HEADER)

    def write(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Append rows, each with the fields of `ROW`."""
        if rows:
            self._file.append(b"".join([_PACK(*row) for row in rows]))  # Takes half as long as with numpy.

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_timeline(file: Path, ranks: int | None = None) -> Timeline:
    """Read one rank's timeline, also of a run in progress; `ranks` is the world size, or None if unknown.

    Rows are checked, since readers use peers as indices and convert times to integers.
    """
    content = read_bytes(file)
    if not content.startswith(MAGIC):
        raise RecordError(f"{file} is damaged: it is not a timeline.")
    if not content.startswith(HEADER):
        raise RecordError(
            f"{file} has another timeline format.", hint="read it with the version of Paceline that wrote it"
        )
    whole = (len(content) - len(HEADER)) // ROW.itemsize
    rows = np.frombuffer(content, dtype=ROW, count=whole, offset=len(HEADER))
    known = np.isin(rows["kind"], list(RowKind)) & np.isin(rows["purpose"], list(Purpose))
    in_order = (rows["start_s"] > -MAX_TIME_S) & (rows["start_s"] <= rows["end_s"]) & (rows["end_s"] < MAX_TIME_S)
    lasts = (rows["kind"] != RowKind.STEP) | (rows["start_s"] < rows["end_s"])
    if not (known & in_order & lasts).all():
        raise RecordError(f"{file} is damaged: a row has an unknown kind, or does not end after it starts.")
    if any((np.abs(rows[name]) >= MAX_TIME_S).any() for name in ("wait_start_s", "cpu_s")):
        raise RecordError(f"{file} is damaged: a row has a time that is out of range.")
    if (rows["peer"] < NO_PEER).any() or (ranks is not None and (rows["peer"] >= ranks).any()):
        raise RecordError(f"{file} is damaged: an operation names a rank that the run did not have.")
    return Timeline(rows[np.argsort(rows["start_s"], kind="stable")])
