"""Finds out which rank failed first, and why: each rank that fails writes its reason down, the launcher reads them.

When one rank fails, the others fail a moment later because it is gone. The one to show is the one that a signal ended,
else the first whose failure was not the loss of a peer.
"""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import BY_NAME, PacelineError, RankError
from paceline.records import RunFolder

_PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "NCCL error")


def record_failure(error: BaseException, rank: int, file: Path) -> None:
    """Writes down why this rank failed."""
    known = isinstance(error, PacelineError)
    reason = {
        "rank": rank,
        "time_ns": time.time_ns(),
        "kind": type(error).__name__,
        "known": known,
        "message": str(error),
        "hint": getattr(error, "hint", None),
        "detail": error.detail if isinstance(error, PacelineError) else traceback.format_exc().rstrip(),
        "peer_lost": not known and any(phrase in str(error) for phrase in _PEER_LOST),
    }
    file.write_text(json.dumps(reason))


def explain(exit_codes: Mapping[int, int], folder: RunFolder) -> PacelineError:
    """The error to show for ranks that ended with these exit codes (by rank; negative: the signal that ended it)."""
    killed = [rank for rank, code in sorted(exit_codes.items()) if code < 0 and -code != signal.SIGTERM]
    if killed:
        return _killed(killed[0], -exit_codes[killed[0]], folder)
    reasons = [json.loads(file.read_text()) for file in folder.error_file(0).parent.glob("rank-*.json")]
    if not reasons:
        rank, code = min(exit_codes.items())
        return RankError(f"rank {rank} ended with exit code {code}.", hint=_see_log(rank, folder))
    first = min(reasons, key=lambda reason: (reason["peer_lost"], reason["time_ns"]))
    return _reason(first, folder)


def _killed(rank: int, number: int, folder: RunFolder) -> RankError:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    cause = "it may have run out of memory; " if number == signal.SIGKILL else ""
    return RankError(f"rank {rank} was ended by {name}.", hint=cause + _see_log(rank, folder))


def _reason(reason: dict[str, Any], folder: RunFolder) -> PacelineError:
    rank = reason["rank"]
    if reason["known"]:
        return BY_NAME[reason["kind"]](reason["message"], hint=reason["hint"], detail=reason["detail"])
    if reason["peer_lost"]:
        return RankError(
            f"rank {rank} lost contact with another rank: {reason['message'].splitlines()[0]}",
            hint=f"look at the other hosts' output; {_see_log(rank, folder)}",
        )
    message = f"{reason['kind']}: {reason['message']}" if reason["message"] else reason["kind"]
    return RankError(f"rank {rank} failed: {message}", detail=reason["detail"], hint=_see_log(rank, folder))


def _see_log(rank: int, folder: RunFolder) -> str:
    return f"its output is in {folder.log_file(rank)}"
