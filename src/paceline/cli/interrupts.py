"""Handling of Ctrl-C for a whole command: it ends the measurement, and never the report of what was measured.

A `CtrlC` handles SIGINT from the start of a command to its end; torch's launcher does not handle it.

    during the measurement       raises KeyboardInterrupt, as Python does
    while that propagates        only noted, so that ranks are ended and displays closed completely
    during the report (`hold`)   only noted; the report takes seconds
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, ClassVar, Self

ONCE_S = 1.0
"""Seconds after a KeyboardInterrupt in which further presses of Ctrl-C count as the same one."""


class CtrlC:
    """Handler of SIGINT for the length of a `with`; afterwards `then` is installed, or else the previous handler.

    A process that was started with SIGINT ignored, as a shell does for `&` in a script, keeps ignoring it.
    """

    _raised_s: ClassVar[float] = -math.inf
    """Time of the last KeyboardInterrupt that an instance raised."""

    def __init__(self, then: signal.Handlers | None = None) -> None:
        self.came = False
        """Whether Ctrl-C was pressed, also where that was only noted."""
        self._then: Any = then
        self._handles = False
        self._held = False
        self._told = False

    def __enter__(self) -> Self:
        before = signal.getsignal(signal.SIGINT)
        self._then = before if self._then is None else self._then
        self._handles = before is not signal.SIG_IGN and threading.current_thread() is threading.main_thread()
        if self._handles:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handles:
            signal.signal(signal.SIGINT, self._then)

    def hold(self) -> None:
        """From now on Ctrl-C is only noted."""
        self._held = True

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.came = True
        if not (self._held or _is_ending() or time.monotonic() < CtrlC._raised_s + ONCE_S):
            CtrlC._raised_s = time.monotonic()
            raise KeyboardInterrupt
        if not self._told:
            self._told = True
            with suppress(OSError):  # `print` is not reentrant, and the signal may have interrupted one.
                os.write(2, b"Ctrl-C: what was measured is kept, one moment\n")


def _is_ending() -> bool:
    """Whether a KeyboardInterrupt propagates: its `except`, `finally` or `__exit__` blocks run at this moment."""
    error = sys.exception()
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None
