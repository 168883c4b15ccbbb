"""Statuses of ranks for tests."""

from __future__ import annotations

from typing import Any

from paceline.comm.watchdog.judge import Hang
from paceline.comm.watchdog.status import Frame, OperationStatus, RankStatus

C10D = "/lib/site-packages/torch/distributed/distributed_c10d.py"
WAITING = [Frame(C10D, 9, "all_reduce"), Frame("/home/me/own.py", 7, "agree")]
SLEEPING = [Frame("/home/me/data.py", 57, "load_batch"), Frame("/home/me/own.py", 3, "main")]
ALL_REDUCE = OperationStatus(kind="all_reduce", bytes=4000, purpose="gradients", number=3, members=[0, 1, 2, 3])


def status(rank: int, **changes: Any) -> RankStatus:
    """Return a status of a rank, by default one that computes in step 412."""
    given: dict[str, Any] = {"beat": 1, "pid": 100 + rank, "progress": 1, "step": 412, "phase": "loading data"}
    return RankStatus(rank=rank, **(given | changes))


def waiting(rank: int, **changes: Any) -> RankStatus:
    """Return the status of a rank that waits in a bucket's all-reduce."""
    return status(rank, **({"operation": ALL_REDUCE, "phase": "in the backward pass", "frames": WAITING} | changes))


def hang_of(*statuses: RankStatus, silent: tuple[int, ...] = (), seconds: float = 61.2) -> Hang:
    """Return a hang of ranks with these statuses."""
    return Hang(
        statuses={one.rank: one for one in statuses},
        stalled_s={one.rank: seconds for one in statuses},
        silent_s=dict.fromkeys(silent, seconds),
        timeout_s=60,
    )
