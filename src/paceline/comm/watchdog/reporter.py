"""Thread that reports the status of a rank to the store of its job, over a connection that nothing else uses.

It only calls `set`, which never waits for an answer, so that it goes on if the link is cut.
"""

from __future__ import annotations

import itertools
import os
import platform
import threading
from collections.abc import Callable
from contextlib import suppress

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from paceline.comm.stores import side_connection
from paceline.comm.stores.signed import SignedStore
from paceline.comm.watchdog.status import Frame, RankStatus, encode, main_thread_frames, operation_status
from paceline.measure.activity import ACTIVITY, RankActivity
from paceline.measure.process_use import ProcessUse
from paceline.signing import Signer

BEAT_S = 1.0
"""Seconds between two statuses, at most."""
BEATS_PER_TIMEOUT = 4
"""Least number of statuses in the time after which a rank counts as hung."""
BUSY_AFTER_BEATS = 2
"""Statuses without progress after which the use of CPUs is measured."""
_PREFIX = "paceline-watchdog"


def beat_period_s(hang_timeout_s: float) -> float:
    """Return the seconds between two statuses."""
    return min(BEAT_S, hang_timeout_s / BEATS_PER_TIMEOUT)


def status_key(rank: int) -> str:
    """Return the key of a rank's status."""
    return f"status-{rank}"


def connect(address: str, port: int, signer: Signer | None, watch: int = 0) -> SignedStore:
    """Return a watch's part of the store at an address, over a new connection.

    `signer` has the key of the job. Without one, anyone who reaches the store can make its signatures. `watch` is the
    number of the watch in the store: the statuses of an earlier one do not fit a later one.
    """
    store = PrefixStore(f"{_PREFIX}-{watch}", side_connection.connect(address, port))
    return SignedStore(store, (signer or Signer(b"")).derive("watchdog", str(watch)))


class Reporter:
    """Reports the status of this rank from `start` to `stop`."""

    def __init__(
        self,
        store: Store,
        rank: int,
        hang_timeout_s: float,
        activity: RankActivity = ACTIVITY,
        on_beat: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_beat` is called after each status."""
        self._on_beat = on_beat
        self._store = store
        self._rank = rank
        self._host = platform.node()
        self._activity = activity
        self._period_s = beat_period_s(hang_timeout_s)
        self._stop = threading.Event()
        self._beats = itertools.count(1)
        self._use: ProcessUse | None = None
        self._progress: tuple[int, ...] = ()
        self._progress_count = 0
        self._unchanged = 0
        self._frames: list[Frame] = []
        self._thread = threading.Thread(target=self._run, daemon=True, name="paceline-watchdog")

    def start(self) -> None:
        """Report the first status, and go on in the background."""
        self.report()
        self._thread.start()

    def stop(self) -> None:
        """Report that this rank has done all its work, and stop."""
        self._stop.set()
        self._thread.join(2 * BEAT_S)
        with suppress(RuntimeError):
            self.report(has_ended=True)

    def report(self, *, has_ended: bool = False) -> RankStatus:
        """Report the current status."""
        status = self._status(has_ended=has_ended)
        self._store.set(status_key(self._rank), encode(status))
        return status

    def _run(self) -> None:
        with suppress(RuntimeError):  # The store is gone: its launcher has ended, and ends this rank.
            while not self._stop.wait(self._period_s):
                self.report()
                self._on_beat()

    def _status(self, *, has_ended: bool) -> RankStatus:
        activity = self._activity
        progress, frames = activity.progress, main_thread_frames()
        self._unchanged = self._unchanged + 1 if progress == self._progress else 0
        if not self._unchanged:
            self._progress, self._use = progress, None
            self._progress_count += 1
        operation = operation_status(activity)
        status = RankStatus(
            rank=self._rank,
            beat=next(self._beats),
            pid=os.getpid(),
            host=self._host,
            progress=self._progress_count,
            is_busy=self._is_busy(frames, waits=operation is not None),
            has_ended=has_ended,
            step=activity.step,
            phase=activity.phase,
            operation=operation,
            frames=frames,
        )
        self._frames = frames
        return status

    def _is_busy(self, frames: list[Frame], *, waits: bool) -> bool:
        """Return whether the rank works, although it reports no progress.

        If an operation is in progress, the main thread `waits` for it, or still computes.
        """
        if self._unchanged < BUSY_AFTER_BEATS:
            return False
        if self._activity.is_sleeping:
            return True
        if self._use is None:
            self._use = ProcessUse()
            return False
        return self._use.is_busy(main_thread_only=waits) and (frames != self._frames or not _uses_gpu())


def _uses_gpu() -> bool:
    """Return whether this process uses a GPU: a thread that waits for one keeps a core busy."""
    import torch

    return bool(torch.cuda.is_initialized())
