"""Activity of this rank at the moment: its step, its phase and the operation it waits in, read by the watchdog."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.measure.operations import ActiveOperation
from paceline.measure.steps import Stopwatch

IDLE = "idle"
"""Activity of a rank that the strategy gives no work."""


class RankActivity:
    """Activity of one process. The compute thread changes it, and the thread of the watchdog reads it.

    Steps cost nothing extra: their phases are read from the stopwatch, and operations from its log.
    """

    def __init__(self) -> None:
        self.doing_now = "starting"
        """Activity besides steps, in words; empty while the rank trains."""
        self._stopwatch: Stopwatch | None = None
        self._first_step = 0
        self._count_steps: Callable[[], int] | None = None
        self._changes = 0

    def reset(self, what: str) -> None:
        """Forget the steps of an earlier run; report what this rank does before the next."""
        self._stopwatch = self._count_steps = None
        self.begin(what)

    def follow(self, stopwatch: Stopwatch, first_step: int = 0) -> None:
        """Report the steps of a stopwatch from now on; its first step has the number `first_step` in the run."""
        self._stopwatch, self._first_step, self._count_steps = stopwatch, first_step, None
        self.begin("")

    def follow_count(self, count_steps: Callable[[], int]) -> None:
        """Report the steps of a loop that has no stopwatch, by a function that returns the number of steps done."""
        self._stopwatch, self._count_steps = None, count_steps
        self.begin("")

    def begin(self, what: str) -> None:
        """Report what this rank does from now on, besides steps; nothing else if it is empty."""
        self.doing_now = what
        self._changes += 1

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Report what this rank does inside the `with` block."""
        before = self.doing_now
        self.begin(what)
        try:
            yield
        finally:
            self.begin(before)

    @property
    def progress(self) -> tuple[int, ...]:
        """Values of which one changes whenever the rank goes on: a phase of a step, an operation, another task."""
        stopwatch = self._stopwatch
        if stopwatch is None:
            return (self._changes, self.step or 0)
        log = stopwatch.operations
        return (self._changes, *stopwatch.changes, 0 if log is None else log.changes)

    @property
    def step(self) -> int | None:
        """Number of the current step, from 0; None before the first."""
        if self._stopwatch is not None:
            return self._first_step + self._stopwatch.next_step
        return None if self._count_steps is None else self._count_steps()

    @property
    def phase(self) -> str:
        """Current activity, in words; empty if unknown."""
        if self.doing_now or self._stopwatch is None:
            return self.doing_now
        return self._stopwatch.phase or "between steps"

    @property
    def is_sleeping(self) -> bool:
        """Whether the rank sleeps in order to emulate a slow one."""
        return self._stopwatch is not None and self._stopwatch.is_sleeping

    def operation(self) -> ActiveOperation | None:
        """Return the oldest operation that has been started and has not ended."""
        if self._stopwatch is None or self._stopwatch.operations is None:
            return None
        return self._stopwatch.operations.in_progress()


ACTIVITY = RankActivity()
"""Activity of this process."""
