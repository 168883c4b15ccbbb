"""Step time as all tables define it: from whole windows of steps, without the first window."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.analysis.running_median import RunningMedian
from paceline.analysis.steps.split import WARM_UP_STEPS, after_warm_up
from paceline.records.events import LogEvent
from paceline.records.reader import RunRecord


class WindowTime(NamedTuple):
    """Consecutive steps timed together: from the start of the first until all communication has finished."""

    steps: int
    wall_s: float
    """Wall time on the slowest rank."""
    profiled: bool = False
    """Whether torch's profiler was active, which makes the time invalid."""
    warm_up: bool = False
    """Whether it belongs to a warm-up of several windows; the first window does not count in any case."""

    @property
    def step_s(self) -> float:
        """Mean time of a step."""
        return self.wall_s / self.steps


class WindowTotals:
    """Sums over the windows of a run, added as they close; in constant memory, except that profiled windows are kept.

    Those are few: one range of steps is profiled.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.wall_s = 0.0
        self.last: WindowTime | None = None
        """Latest window; None before the first."""
        self._profiled: list[range] = []
        self._step_times = RunningMedian()

    @classmethod
    def of(cls, windows: Iterable[WindowTime]) -> WindowTotals:
        """Return the totals of some windows."""
        totals = cls()
        for window in windows:
            totals.add(window)
        return totals

    def resume(self, windows: Iterable[WindowTime], *, steps: int, wall_s: float) -> None:
        """Continue a run of so many steps and seconds, of whose windows some may not be known."""
        for window in windows:
            self.add(window)
        self.steps, self.wall_s = steps, wall_s

    def add(self, window: WindowTime) -> None:
        """Add the next window."""
        if window.profiled:
            self._profiled.append(range(self.steps, self.steps + window.steps))
        elif self.last is not None and not window.warm_up:
            self._step_times.add(window.step_s)
        self.steps += window.steps
        self.wall_s += window.wall_s
        self.last = window

    @property
    def step_s(self) -> float | None:
        """Median of wall time ÷ steps over windows, without warm-up and profiled ones; None if none remain."""
        return self._step_times.value

    @property
    def profiled_steps(self) -> frozenset[int]:
        """Steps in profiled windows, whose times are invalid."""
        return frozenset(itertools.chain.from_iterable(self._profiled))


def step_time(windows: Iterable[WindowTime]) -> float | None:
    """Return the median of wall time ÷ steps over windows, without warm-up and profiled ones; None if none remain."""
    return WindowTotals.of(windows).step_s


def counted_windows(windows: Sequence[WindowTime]) -> list[WindowTime]:
    """Return the windows whose times count: all but the first, further ones of the warm-up, and profiled ones."""
    return [window for window in windows[1:] if not window.profiled and not window.warm_up]


def windows_of(record: RunRecord) -> list[WindowTime]:
    """Return the windows of a run, also of an interrupted one."""
    return [window_of(log) for log in record.events_of(LogEvent)]


def windows_of_attempt(record: RunRecord) -> list[WindowTime]:
    """Return the windows of the steps in the files of ranks: those since a run resumed, or all of them."""
    return [window_of(log) for log in record.events_of(LogEvent) if log.step > record.first_step]


def window_of(log: LogEvent) -> WindowTime:
    """Return the window that an event describes."""
    return WindowTime(len(log.losses), log.wall_s, profiled=log.profiled, warm_up=log.warm_up)


def profiled_steps(windows: Iterable[WindowTime]) -> frozenset[int]:
    """Return the steps in profiled windows, whose times are invalid."""
    return WindowTotals.of(windows).profiled_steps


def counted_steps(windows: Sequence[WindowTime], steps: int) -> npt.NDArray[np.bool_]:
    """Return a mask of a rank's steps whose times count: after the warm-up and not profiled.

    If there are none, all but the first and profiled steps count, as in the time split.
    """
    profiled = profiled_steps(windows)
    timed = np.array([step for step in range(1, steps) if step not in profiled], dtype=np.int64)
    counted = np.zeros(steps, dtype=np.bool_)
    counted[timed[after_warm_up(timed)]] = True
    return counted


def includes_warm_up(record: RunRecord) -> bool:
    """Return whether a run is so short that its means include warm-up steps."""
    windows = windows_of_attempt(record)
    lengths = [len(steps) for steps in record.steps.values() if len(steps)]
    return any(not counted_steps(windows, length)[WARM_UP_STEPS:].any() for length in lengths)


def losses_of(record: RunRecord) -> list[float]:
    """Return the global mean loss of every step: NaN where it diverged; empty if losses were not reported."""
    if record.steps and not any(steps.has_loss for steps in record.steps.values()):
        return []
    losses = [loss for log in record.events_of(LogEvent) for loss in log.losses]
    return [float("nan") if loss is None else loss for loss in losses]
