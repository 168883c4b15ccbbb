"""Model of `errors/rank-N.json`, in which a rank that fails writes why."""

from __future__ import annotations

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An error, for another process."""

    kind: str
    """Name of its class."""
    message: str
    hint: str | None = None
    detail: str | None = None
    """Traceback, or other text to show above the message."""


class RankFailure(ErrorInfo, frozen=True, kw_only=True):
    """The failure of a rank."""

    rank: int
    run: int | None = None
    """Index of the run in its job; None before the first run, and for a script."""
    time_ns: int
    """Time of the failure, in nanoseconds since 1970."""
    known: bool
    """Whether `kind` is one of Paceline's errors, whose message is shown as it is."""
    peer_lost: bool
    """Whether the rank failed because it lost the connection to another rank."""
