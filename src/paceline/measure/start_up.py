"""Time from the launch of the ranks to the first step, by part, on one rank."""

from __future__ import annotations

import time


class StartUp:
    """Parts of the start of a run, in order: each lasts from the end of the one before it."""

    def __init__(self) -> None:
        self._ended_s = time.time()
        self._parts: dict[str, float] = {}

    def begin(self, at_s: float) -> None:
        """Begin the start of a run, at a Unix time."""
        self._ended_s, self._parts = at_s, {}

    def end_of(self, part: str) -> None:
        """Add the time since the end of the part before to `part`."""
        now_s = time.time()
        self._parts[part] = self._parts.get(part, 0.0) + max(0.0, now_s - self._ended_s)
        self._ended_s = now_s

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part that has ended."""
        return {part: round(seconds, 6) for part, seconds in self._parts.items()}


START_UP = StartUp()
"""Start of the current run of this process."""
