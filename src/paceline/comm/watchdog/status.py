"""Status of a rank, as it reports it about once per second, and the stack of its main thread."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

import msgspec

from paceline.measure.activity import RankActivity
from paceline.records.timeline import NO_PEER

MOST_FRAMES = 60
_FOLDER = str(Path(__file__).parent)
_RANK_PROCESS = str(Path("paceline", "launch", "rank.py"))


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One function call of a stack."""

    file: str
    line: int
    function: str


class OperationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Operation that a rank has started and that has not ended."""

    kind: str
    """Name of the operation, as in torch.distributed."""
    bytes: int
    purpose: str
    """Content, as in timelines: gradients, weights and so on."""
    number: int
    """Number of gradient operations that the step has started before it."""
    peer: int | None = None
    """Root, sender or receiver."""
    members: list[int] = []
    """Ranks that take part; empty for all."""
    step: int = 0


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Activity of a rank at one moment."""

    rank: int
    beat: int
    """Number of this status: a rank whose number does not grow does not run."""
    pid: int
    host: str = ""
    """Name of its host."""
    progress: int
    """Changes whenever the rank goes on."""
    is_busy: bool = False
    """Whether it computes, or reads or writes files, although it reports no progress."""
    has_ended: bool = False
    """Whether it has done all its work."""
    step: int | None = None
    phase: str = ""
    operation: OperationStatus | None = None
    frames: list[Frame] = []
    """Stack of the main thread, the innermost call first."""


def operation_status(activity: RankActivity) -> OperationStatus | None:
    """Return the oldest operation in progress; None if there is none, or if operations are not recorded."""
    operation = activity.operation()
    if operation is None:
        return None
    return OperationStatus(
        kind=operation.kind.title,
        bytes=operation.bytes,
        purpose=operation.purpose.title,
        number=operation.number,
        peer=None if operation.peer == NO_PEER else operation.peer,
        members=list(operation.members),
        step=operation.step,
    )


def main_thread_frames() -> list[Frame]:
    """Return the stack of the main thread, the innermost call first."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[Frame] = []
    while frame is not None and frame.f_code.co_filename.startswith(_FOLDER):  # The first status is made there.
        frame = frame.f_back
    while frame is not None and len(frames) < MOST_FRAMES:
        file = frame.f_code.co_filename
        frames.append(Frame(file, frame.f_lineno or 0, frame.f_code.co_name))
        frame = None if file.endswith(_RANK_PROCESS) else frame.f_back  # Nothing of interest starts that process.
    return frames


def encode(status: RankStatus) -> str:
    """Return a status as JSON."""
    return msgspec.json.encode(status).decode()


def decode(content: bytes) -> RankStatus | None:
    """Return the status in a message, which may come from anywhere; None if it is none."""
    try:
        return msgspec.json.decode(content, type=RankStatus)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def format_stack(frames: list[Frame]) -> str:
    """Return a stack as text, the innermost call first, as faulthandler prints it."""
    return "\n".join(f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in frames)
