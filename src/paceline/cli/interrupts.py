"""Ctrl-C handling for a whole command: it stops the measurement, but never the report of what was measured.

A `CtrlCHandler` handles SIGINT from the start of a command to its end; torch's launcher does not handle it. SIGTERM, as
sent by `kill` and Slurm, SIGUSR1, which Slurm sends on request, and SIGHUP, sent when a terminal is closed, have the
same effect. While ranks run, torch's launcher handles these three, and `launch/elastic.py` raises KeyboardInterrupt;
the ranks of a run with checkpoints write one first (`launch/faults/stop_signals.py`).

    during the measurement        raises KeyboardInterrupt, as Python does
    while that propagates         only recorded, so that ranks are stopped and displays closed completely
    during the report (`defer`)   only recorded; the report takes seconds
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, ClassVar, Self

from paceline.errors import INTERRUPTED_EXIT_CODE

REPEAT_WINDOW_S = 1.0
"""Seconds after a KeyboardInterrupt in which further presses of Ctrl-C count as the same one."""
SIGNALS = {signal.SIGINT: b"Ctrl-C", signal.SIGTERM: b"SIGTERM", signal.SIGHUP: b"SIGHUP", signal.SIGUSR1: b"SIGUSR1"}
"""Signals that interrupt a command, with their names in messages."""


class CtrlCHandler:
    """Handler of Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP for the duration of a `with` block.

    Afterwards it installs `handler_after`, or restores the previous handlers if that is None. A signal that the process
    was started to ignore stays ignored: a shell does so with SIGINT for `&` in a script, nohup with SIGHUP.
    """

    _raised_s: ClassVar[float] = -math.inf
    """Time of the last KeyboardInterrupt that an instance raised."""

    def __init__(self, handler_after: signal.Handlers | None = None) -> None:
        self.pressed = False
        """Whether the command was interrupted, even if that was only recorded."""
        self._handler_after = handler_after
        self._previous: dict[signal.Signals, Any] = {}
        """Handlers that this one replaces."""
        self._deferred = False
        self._notified = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in SIGNALS}
            self._previous = {
                number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)
            }
        for number in self._previous:
            signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous if self._handler_after is None else self._handler_after)

    @property
    def exit_code(self) -> int:
        """Exit code of a command that had no error."""
        return INTERRUPTED_EXIT_CODE if self.pressed else 0

    def defer(self) -> None:
        """Only record Ctrl-C from now on, without raising."""
        self._deferred = True

    @contextmanager
    def errors_are_interrupts(self) -> Iterator[None]:
        """Raise KeyboardInterrupt in place of an error that follows Ctrl-C: libraries may replace the former."""
        try:
            yield
        except KeyboardInterrupt:
            self.pressed = True  # Also if torch's launcher handled the signal.
            raise
        except Exception as error:
            if self.pressed:
                raise KeyboardInterrupt from error
            raise

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.pressed = True
        if not (self._deferred or _is_propagating() or time.monotonic() < CtrlCHandler._raised_s + REPEAT_WINDOW_S):
            CtrlCHandler._raised_s = time.monotonic()
            raise KeyboardInterrupt
        if not self._notified:
            self._notified = True
            with suppress(OSError):  # `print` is not reentrant, and the signal may have interrupted one.
                os.write(2, SIGNALS[signal.Signals(number)] + b" received: finishing, measured data is kept\n")


def _is_propagating() -> bool:
    """Return whether a KeyboardInterrupt propagates: its `except`, `finally` or `__exit__` blocks are running."""
    error = sys.exception()
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None
