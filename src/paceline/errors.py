"""The exceptions a user may meet: one tree, one exit code per branch.

    PacelineError        1   anything that went wrong in a way we can explain
    ├── UsageError       2   a name, value or combination that cannot be
    ├── DataError        3   a data set that is missing, truncated or tampered with
    ├── WorkloadError    4   the user's own code failed, or is not what it should be
    ├── LaunchError      5   ranks could not be started or could not find each other
    ├── RankError        6   a rank died, or failed while training
    ├── ParityError      7   a strategy that promises the mean gradient computes something else
    └── RecordError      8   a record that cannot be read or would be overwritten

A message is one sentence on what was found; `hint` is one on what to do about it. `detail` is shown before both: a
traceback that belongs to the user's own code. Anything outside this tree is our mistake and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar

PROBLEM_EXIT_CODE = 9
"""What `paceline doctor` leaves with when it found a problem: nothing went wrong, but something has to be mended."""
INTERRUPTED_EXIT_CODE = 130
"""What a shell expects of a command that Ctrl-C ended (128 + SIGINT)."""


class PacelineError(Exception):
    """An error with one sentence on what was found and, in `hint`, one on what to do."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None, detail: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.detail = detail
        self.run: int | None = None
        """Which of a job's runs it happened in, where that is known."""
        if hint:
            self.add_note(f"hint: {hint}")  # Shown where the error ends a program of the user's own.


class UsageError(PacelineError):
    """A name, value or combination that cannot be."""

    exit_code = 2


class DataError(PacelineError):
    """A data set that is missing, truncated or tampered with."""

    exit_code = 3


class WorkloadError(PacelineError):
    """The user's own code failed, or is not what it should be."""

    exit_code = 4


class LaunchError(PacelineError):
    """Ranks could not be started or could not find each other."""

    exit_code = 5


class RankError(PacelineError):
    """A rank died, or failed while training."""

    exit_code = 6

    def __init__(
        self, message: str, *, hint: str | None = None, detail: str | None = None, peer_lost: bool = False
    ) -> None:
        super().__init__(message, hint=hint, detail=detail)
        self.peer_lost = peer_lost
        """Whether it only waited for another that is gone: the reason to show is that one's."""


class ParityError(PacelineError):
    """A strategy that promises the mean gradient computes something else."""

    exit_code = 7


class RecordError(PacelineError):
    """A record that cannot be read or would be overwritten."""

    exit_code = 8


BY_NAME: dict[str, type[PacelineError]] = {
    kind.__name__: kind
    for kind in (
        PacelineError,
        UsageError,
        DataError,
        WorkloadError,
        LaunchError,
        RankError,
        ParityError,
        RecordError,
    )
}
"""The tree by class name: how an error crosses from a rank's process to the launcher's."""


def unknown_name(what: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that is not among `known`: the nearest one if there is one, then all of them."""
    names = sorted(known)
    return UsageError(f"there is no {what} {name!r}.", hint=f"{_nearest(name, names)}known: {', '.join(names)}")


def wrong_choice(option: str, value: str, choices: Iterable[str]) -> UsageError:
    """The error for a value that an option does not take."""
    names = sorted(choices)
    return UsageError(f"{option} cannot be {value!r}.", hint=f"{_nearest(value, names)}choices: {', '.join(names)}")


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}? " if near else ""
