"""Exceptions shown to users: one tree, one exit code per branch.

    PacelineError        1   any error with a known cause
    ├── UsageError       2   an unknown name, an invalid value or an invalid combination of options
    ├── DataError        3   a data set is missing, truncated or altered
    ├── WorkloadError    4   the user's code raised an exception or has the wrong interface
    ├── LaunchError      5   ranks could not start or could not connect to each other
    ├── RankError        6   a rank process was killed or failed during a run
    │   └── HangError   13   ranks wait, and none of them goes on
    ├── ParityError      7   a strategy that should compute the mean gradient computes another value
    ├── RecordError      8   a record cannot be read, or would be overwritten
    ├── ReplicaError    10   replicas of the model that should be equal on all ranks differ
    ├── DivergenceError 11   the loss of a run is not finite, or its gradients are not in many steps in a row
    ├── CheckpointError 12   a checkpoint cannot be written or read, or a state cannot be kept in one
    └── PreemptedError  75   a signal stopped a run after a checkpoint, from which it can go on

The message says in one sentence what was found; `hint` says in one sentence what to do. `detail` is printed before
both, for example the traceback of the user's code. Any other exception is a bug in Paceline and is shown with its
traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar, Literal

from paceline.formatting import printable

PROBLEM_EXIT_CODE = 9
"""Exit code of `paceline doctor` when it ran without an error and found a problem to fix."""
INTERRUPTED_EXIT_CODE = 130
"""Exit code after Ctrl-C, as shells expect it (128 + SIGINT)."""


class PacelineError(Exception):
    """Base class: one sentence on what was found and, in `hint`, one on what to do."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None, detail: str | None = None) -> None:
        self.message = printable(message)  # It may quote a file or an option, of any length and content.
        super().__init__(self.message)
        self.hint = hint = None if hint is None else printable(hint)
        self.detail = detail
        self.run: int | None = None
        """Index of the run in its job in which the error occurred; None where unknown."""
        if hint:
            self.add_note(f"hint: {hint}")  # Shown in tracebacks of a user's program.


class UsageError(PacelineError):
    """Unknown name, invalid value or invalid combination of options."""

    exit_code = 2


class DataError(PacelineError):
    """Data set that is missing, truncated or altered."""

    exit_code = 3


class WorkloadError(PacelineError):
    """Exception in the user's code, or user code with the wrong interface."""

    exit_code = 4


class LaunchError(PacelineError):
    """Ranks could not start or could not connect to each other."""

    exit_code = 5


OutOfMemory = bool | Literal["probably"]
"""Whether a rank ran out of memory; "probably" if it was killed by SIGKILL, as the kernel does when memory runs out."""


class RankError(PacelineError):
    """A rank process was killed or failed during a run."""

    exit_code = 6

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        detail: str | None = None,
        peer_lost: bool = False,
        out_of_memory: OutOfMemory = False,
    ) -> None:
        super().__init__(message, hint=hint, detail=detail)
        self.out_of_memory = out_of_memory
        """Whether the rank ran out of memory."""
        self.peer_lost = peer_lost
        """Whether this rank failed only because it lost a peer; the peer's error is then the root cause."""


class HangError(RankError):
    """Ranks wait for each other or for a rank that does not answer, and none of them goes on."""

    exit_code = 13


class ParityError(PacelineError):
    """Strategy that should compute the mean gradient and computes another value."""

    exit_code = 7


class RecordError(PacelineError):
    """Record that cannot be read, or would be overwritten."""

    exit_code = 8


class ReplicaError(PacelineError):
    """Replicas of the model that should be equal on all ranks and differ."""

    exit_code = 10


class DivergenceError(PacelineError):
    """Loss of a run that is not finite, or gradients that are not finite in many steps in a row."""

    exit_code = 11


class CheckpointError(PacelineError):
    """Checkpoint that cannot be written or read."""

    exit_code = 12


class PreemptedError(PacelineError):
    """Run that a signal stopped after a checkpoint, from which it can go on.

    The exit code is EX_TEMPFAIL of sysexits.h: try again later.
    """

    exit_code = 75


ERRORS_BY_NAME: dict[str, type[PacelineError]] = {
    kind.__name__: kind
    for kind in (
        PacelineError,
        UsageError,
        DataError,
        WorkloadError,
        LaunchError,
        RankError,
        HangError,
        ParityError,
        RecordError,
        ReplicaError,
        DivergenceError,
        CheckpointError,
        PreemptedError,
    )
}
"""Exception classes by name, to rebuild an error that another process sent."""


_PEER_LOST_PHRASES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "NCCL error",
)


def is_peer_lost(error: BaseException) -> bool:
    """Return whether an error of torch means that this rank lost, or no longer waits for, another rank."""
    return any(phrase in str(error) for phrase in _PEER_LOST_PHRASES)


def unknown_name(what: str, name: str, known: Iterable[str]) -> UsageError:
    """Return the error for a name that is not in `known`; its hint lists the closest match, then all known names."""
    names = sorted(known)
    return UsageError(f"there is no {what} {name!r}.", hint=f"{_nearest(name, names)}known: {', '.join(names)}")


def wrong_choice(option: str, value: str, choices: Iterable[str]) -> UsageError:
    """Return the error for an option value that is not in `choices`."""
    names = sorted(choices)
    return UsageError(f"{option} cannot be {value!r}.", hint=f"{_nearest(value, names)}choices: {', '.join(names)}")


MOST_TYPOS = 2
"""Most typing mistakes in a name; a name with more of them is probably an abbreviation."""


def _nearest(name: str, names: list[str]) -> str:
    """Return the question whether the closest name was meant; empty if none is close."""

    def distance(other: str) -> tuple[int, float]:
        alike = difflib.SequenceMatcher(None, other, name).ratio()
        return min(_edit_distance(name, other), MOST_TYPOS + 1), -alike

    near = difflib.get_close_matches(name, names, n=len(names) or 1, cutoff=0.5)
    return f"did you mean {min(near, key=distance)!r}? " if near else ""


def _edit_distance(one: str, other: str) -> int:
    """Return the least number of letters to insert, remove, replace, or swap with the next one."""
    before_last, last = list[int](), list(range(len(other) + 1))
    for row, letter in enumerate(one, 1):
        current = [row]
        for column, wanted in enumerate(other, 1):
            changes = [last[column] + 1, current[-1] + 1, last[column - 1] + (letter != wanted)]
            if row > 1 < column and letter == other[column - 2] and one[row - 2] == wanted:
                changes.append(before_last[column - 2] + 1)
            current.append(min(changes))
        before_last, last = last, current
    return last[-1]
