"""Ctrl-C handling for a whole command: it stops the measurement, but never the report of what was measured.

A `CtrlCHandler` handles SIGINT from the start of a command to its end; torch's launcher does not handle it.

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

REPEAT_WINDOW_S = 1.0
"""Seconds after a KeyboardInterrupt in which further presses of Ctrl-C count as the same one."""


class CtrlCHandler:
    """SIGINT handler for the duration of a `with` block.

    Afterwards it installs `handler_after`, or restores the previous handler if that is None. If the process was started
    with SIGINT ignored, as a shell does for `&` in a script, the signal stays ignored.
    """

    _raised_s: ClassVar[float] = -math.inf
    """Time of the last KeyboardInterrupt that an instance raised."""

    def __init__(self, handler_after: signal.Handlers | None = None) -> None:
        self.pressed = False
        """Whether Ctrl-C was pressed, even if it was only recorded."""
        self._handler_after: Any = handler_after
        self._installed = False
        self._deferred = False
        self._notified = False

    def __enter__(self) -> Self:
        previous = signal.getsignal(signal.SIGINT)
        self._handler_after = previous if self._handler_after is None else self._handler_after
        self._installed = previous is not signal.SIG_IGN and threading.current_thread() is threading.main_thread()
        if self._installed:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._handler_after)

    def defer(self) -> None:
        """Only record Ctrl-C from now on, without raising."""
        self._deferred = True

    @contextmanager
    def errors_are_interrupts(self) -> Iterator[None]:
        """Raise KeyboardInterrupt in place of an error that follows Ctrl-C: libraries may replace the former."""
        try:
            yield
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
                os.write(2, b"Ctrl-C received: finishing, measured data is kept\n")


def _is_propagating() -> bool:
    """Return whether a KeyboardInterrupt propagates: its `except`, `finally` or `__exit__` blocks are running."""
    error = sys.exception()
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None
