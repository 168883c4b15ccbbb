"""SIGTERM and SIGUSR1 while the ranks of a run with checkpoints train: they write a checkpoint and end.

    first signal        the request to stop is set in the store of the job; a follower asks the leader to do so
    after `grace_s`     ranks that still run are ended, as without checkpoints
    second SIGTERM      the same at once

Between two attempts of a run that is restarted, no ranks can be asked: `EarlyStop` keeps the signal.

Slurm sends SIGUSR1 before the time limit (`--signal`), and SIGTERM when it preempts, requeues or cancels a job.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException

from paceline.errors import LaunchError
from paceline.formatting import short_seconds
from paceline.launch.launcher_process import Notify

STOP_REQUESTS = (signal.SIGTERM, signal.SIGUSR1)
POLL_S = 0.2
REPEAT_WINDOW_S = 1.0
"""Seconds in which several SIGTERM count as one: Slurm may send it to a task, and `srun` send it again."""


@dataclass
class EarlyStop:
    """Signal to stop that arrives while no ranks run, before the first attempt at a run or between two."""

    received: signal.Signals | None = None
    """First signal that was kept."""
    _received_at_s: float = math.inf

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep signals for the duration of a `with` block, instead of their usual effect, until a second SIGTERM."""
        with _handled_by(self._handle):
            yield

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        now = time.monotonic()
        if number == signal.SIGTERM and now > self._received_at_s + REPEAT_WINDOW_S:
            raise KeyboardInterrupt
        self.received, self._received_at_s = self.received or signal.Signals(number), min(self._received_at_s, now)


@contextmanager
def _handled_by(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let a function handle the signals that are not ignored, if this is the main thread."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in STOP_REQUESTS}
        before = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class GracefulStop:
    """Stop of a launcher's ranks on request, and its state."""

    request: Callable[[], None]
    """Asks the ranks of the job to stop."""
    is_requested_elsewhere: Callable[[], bool]
    """Returns whether another launcher received a signal."""
    grace_s: float
    """Seconds in which the ranks must end."""
    notify: Notify
    early: EarlyStop = field(default_factory=EarlyStop)
    """Signal that this launcher received before its ranks were started."""
    received: signal.Signals | None = None
    """First signal that this launcher received."""
    requested: bool = False
    """Whether a signal asked for a stop, even if the ranks failed before they were asked."""
    expired: bool = False
    """Whether ranks still ran after that time."""
    _sigterm_at_s: float = math.inf

    @contextmanager
    def handling(self, end_ranks: Callable[[], None]) -> Iterator[None]:
        """Handle the signals for the duration of a `with` block; `end_ranks` ends ranks that do not stop in time."""
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(done, end_ranks), daemon=True, name="paceline-stop-watch")
        with _handled_by(self._handle):
            self.received = self.received or self.early.received
            watcher.start()
            try:
                yield
            finally:
                done.set()
                watcher.join(POLL_S)  # It blocks in the store if the link to host 0 is cut.
                self.requested = self.requested or self.received is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        now = time.monotonic()
        if self.received is None:
            self.received = signal.Signals(number)
        if number == signal.SIGTERM:
            if now > self._sigterm_at_s + REPEAT_WINDOW_S:
                raise SignalException("a second SIGTERM was received", signal.SIGTERM)
            self._sigterm_at_s = min(self._sigterm_at_s, now)

    def _watch(self, done: threading.Event, end_ranks: Callable[[], None]) -> None:
        try:
            while self.received is None and not self.is_requested_elsewhere():
                if done.wait(POLL_S):
                    return
            name = "another host" if self.received is None else self.received.name
            self.notify(f"{name} asked to stop: ranks write a checkpoint, within {short_seconds(self.grace_s)}")
            self.requested = True
            self.request()
        except (LaunchError, RuntimeError):  # The leader has ended, and its ranks with it.
            return
        if not done.wait(self.grace_s):
            self.expired = True
            self.notify(f"ranks did not stop within {short_seconds(self.grace_s)} (--grace), and are ended")
            end_ranks()
