"""Step time as all tables define it: from whole windows of steps, without the first window."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.analysis.steps.split import WARM_UP_STEPS
from paceline.records.events import LogEvent
from paceline.records.reader import RunRecord


class WindowTime(NamedTuple):
    """Consecutive steps timed together: from the start of the first until all communication has finished."""

    steps: int
    wall_s: float
    """Wall time on the slowest rank."""
    profiled: bool = False
    """Whether torch's profiler was active, which makes the time invalid."""


def step_time(windows: Sequence[WindowTime]) -> float | None:
    """Return the median of wall time ÷ steps over windows, without the first and profiled ones; None if none remain."""
    times = [window.wall_s / window.steps for window in windows[1:] if not window.profiled]
    return statistics.median(times) if times else None


def windows_of(record: RunRecord) -> list[WindowTime]:
    """Return the windows of a run, also of an interrupted one."""
    return [WindowTime(len(log.losses), log.wall_s, profiled=log.profiled) for log in record.events_of(LogEvent)]


def profiled_steps(windows: Sequence[WindowTime]) -> frozenset[int]:
    """Return the steps in profiled windows, whose times are invalid."""
    ends = itertools.accumulate(window.steps for window in windows)
    spans = [range(end - window.steps, end) for window, end in zip(windows, ends, strict=True) if window.profiled]
    return frozenset(itertools.chain.from_iterable(spans))


def counted_steps(windows: Sequence[WindowTime], steps: int) -> npt.NDArray[np.bool_]:
    """Return a mask of a rank's steps whose times count: after the warm-up and not profiled.

    If there are none, all but the first and profiled steps count, as in the time split.
    """
    counted = np.arange(steps) > 0
    counted[[step for step in profiled_steps(windows) if step < steps]] = False
    later = counted & (np.arange(steps) >= WARM_UP_STEPS)
    return later if later.any() else counted


def includes_warm_up(record: RunRecord) -> bool:
    """Return whether a run is so short that its means include warm-up steps."""
    windows = windows_of(record)
    lengths = [len(steps) for steps in record.steps.values() if len(steps)]
    return any(not counted_steps(windows, length)[WARM_UP_STEPS:].any() for length in lengths)


def losses_of(record: RunRecord) -> list[float]:
    """Return the global mean loss of every step: NaN where it diverged; empty if losses were not reported."""
    if record.steps and not any(steps.has_loss for steps in record.steps.values()):
        return []
    losses = [loss for log in record.events_of(LogEvent) for loss in log.losses]
    return [float("nan") if loss is None else loss for loss in losses]
