"""Ctrl-C while results are being written: they are nearly there, so it waits for them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class HeldInterrupt:
    """Whether Ctrl-C came meanwhile."""

    came = False

    def note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """The handler."""
        self.came = True


@contextmanager
def hold_interrupt() -> Iterator[HeldInterrupt]:
    """Holds Ctrl-C back for the length of a `with`, and tells whether it came."""
    held = HeldInterrupt()
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, held.note)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, before)
