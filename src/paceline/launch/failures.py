"""Finds out which rank failed first, and why: each rank that fails writes its reason down, the launcher reads them.

When one rank fails, the others fail a moment later because it is gone. The one to show is the one that a signal ended,
else the first whose failure was not the loss of a peer.
"""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import BY_NAME, PacelineError, RankError
from paceline.records import RunFolder
from paceline.records.writer import write_json

_PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "NCCL error")
_WRAPPER = "'DistributedDataParallel' object"
_STACK = "Stack (most recent call first):"
"""How faulthandler starts the stack that a rank prints when the launcher ends it."""


def record_failure(error: BaseException, rank: int, file: Path, run: int | None = None) -> None:
    """Writes down why this rank failed, and in which of the job's runs."""
    known = isinstance(error, PacelineError)
    reason = {
        "rank": rank,
        "run": run,
        "time_ns": time.time_ns(),
        "kind": type(error).__name__,
        "known": known,
        "message": str(error),
        "hint": getattr(error, "hint", None),
        "detail": error.detail if isinstance(error, PacelineError) else traceback.format_exc().rstrip(),
        "peer_lost": error.peer_lost
        if isinstance(error, RankError)
        else not known and any(phrase in str(error) for phrase in _PEER_LOST),
    }
    write_json(file, reason)


def explain(exit_codes: Mapping[int, int], folder: RunFolder, ranks: Iterable[int]) -> PacelineError:
    """The error to show for the ranks of a job, given how some ended (negative: the signal that ended it)."""
    reasons = [json.loads(folder.error_file(rank).read_text()) for rank in ranks if folder.error_file(rank).exists()]
    reasons.sort(key=lambda reason: (reason["peer_lost"], reason["time_ns"]))
    error = _error_to_show(exit_codes, reasons, folder, ranks)
    error.run = reasons[0].get("run") if reasons else None
    return error


def to_message(error: BaseException | None) -> dict[str, Any]:
    """How an end, or a failure, crosses to another host."""
    if error is None or isinstance(error, KeyboardInterrupt):
        return {"kind": None, "interrupted": error is not None}
    known = isinstance(error, PacelineError)
    return {
        "kind": type(error).__name__ if known else PacelineError.__name__,
        "interrupted": False,
        "message": str(error) or type(error).__name__,
        "hint": error.hint if isinstance(error, PacelineError) else None,
        "detail": error.detail if isinstance(error, PacelineError) else None,
    }


def from_message(farewell: Mapping[str, Any]) -> PacelineError:
    return BY_NAME[farewell["kind"]](farewell["message"], hint=farewell["hint"], detail=farewell["detail"])


def _error_to_show(
    exit_codes: Mapping[int, int], reasons: list[dict[str, Any]], folder: RunFolder, ranks: Iterable[int]
) -> PacelineError:
    killed = [rank for rank, code in sorted(exit_codes.items()) if code < 0 and -code != signal.SIGTERM]
    if killed:
        return _killed(killed[0], -exit_codes[killed[0]], folder)
    if not reasons:
        rank, code = min(exit_codes.items())
        return RankError(f"rank {rank} ended with exit code {code}.", hint=_see_log(rank, folder))
    if not reasons[0]["peer_lost"]:
        return _reason(reasons[0], folder)
    failed = {reason["rank"] for reason in reasons}
    return _peer_lost(reasons[0], [rank for rank in ranks if rank not in failed], folder)


def _killed(rank: int, number: int, folder: RunFolder) -> RankError:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    cause = "it may have run out of memory; " if number == signal.SIGKILL else ""
    return RankError(f"rank {rank} was ended by {name}.", hint=cause + _see_log(rank, folder))


def _reason(reason: dict[str, Any], folder: RunFolder) -> PacelineError:
    rank = reason["rank"]
    if reason["known"]:
        return BY_NAME[reason["kind"]](reason["message"], hint=reason["hint"], detail=reason["detail"])
    message = f"{reason['kind']}: {reason['message']}" if reason["message"] else reason["kind"]
    wrapped = "a step has to call model(…) itself, which ddp goes around; " if _WRAPPER in message else ""
    return RankError(f"rank {rank} failed: {message}", detail=reason["detail"], hint=wrapped + _see_log(rank, folder))


def _peer_lost(reason: dict[str, Any], silent: list[int], folder: RunFolder) -> RankError:
    """For a rank that waited in vain: the ranks that neither failed nor answered, and where they were."""
    rank, found = reason["rank"], reason["message"].splitlines()[0].rpartition("] ")[2]
    if not silent:
        return RankError(f"rank {rank} lost contact with another rank: {found}", hint=_see_log(rank, folder))
    names = ("rank " if len(silent) == 1 else "ranks ") + ", ".join(map(str, silent))
    return RankError(
        f"rank {rank} gave up waiting ({found}); {names} did not answer.",
        hint=f"what it was doing stands above; --timeout waits longer; {_see_log(silent[0], folder)}",
        detail=_stack_in(folder.log_file(silent[0])),
    )


def _stack_in(log: Path) -> str | None:
    """Where a rank was when the launcher ended it, from the end of its log."""
    if not log.exists():
        return None
    _, mark, stack = log.read_text(errors="replace").rpartition(_STACK)
    return (mark + stack).strip() if mark else None


def _see_log(rank: int, folder: RunFolder) -> str:
    return f"its output is in {folder.log_file(rank)}"
