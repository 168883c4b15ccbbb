"""Time per iteration, as every table defines it: whole windows, the first never counted."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.analysis.steps.split import WARM_UP_STEPS
from paceline.errors import RecordError
from paceline.records.reader import RunRecord
from paceline.records.schema import EVENTS_FILE


class WindowTime(NamedTuple):
    """Steps that were timed as one: from the first's start until nothing is in flight any more."""

    steps: int
    wall_s: float
    """On the slowest rank."""
    profiled: bool = False
    """Whether torch's profiler slowed it down, so that its time says nothing."""


def step_time(windows: Sequence[WindowTime]) -> float | None:
    """The median of wall time ÷ steps over the windows but the first, and but profiled ones; None without others."""
    times = [window.wall_s / window.steps for window in windows[1:] if not window.profiled]
    return statistics.median(times) if times else None


def windows_of(record: RunRecord) -> list[WindowTime]:
    """The windows of a run, those of one that was cut short too."""
    try:
        return [
            WindowTime(len(event["losses"]), float(event["wall_s"]), profiled=event.get("profiled") is True)
            for event in record.events_of("log")
        ]
    except (KeyError, TypeError, ValueError):
        raise RecordError(f"{record.path / EVENTS_FILE} is damaged: a window has no losses, or no time.") from None


def profiled_steps(windows: Sequence[WindowTime]) -> frozenset[int]:
    """The steps whose times say nothing, since their window was profiled."""
    ends = itertools.accumulate(window.steps for window in windows)
    spans = [range(end - window.steps, end) for window, end in zip(windows, ends, strict=True) if window.profiled]
    return frozenset(itertools.chain.from_iterable(spans))


def counted_steps(windows: Sequence[WindowTime], steps: int) -> npt.NDArray[np.bool_]:
    """Which of a rank's steps have times that count: those after the warm-up, but for those that were profiled.

    Where there are no others, all but the first, as in the time split.
    """
    counted = np.arange(steps) > 0
    counted[[step for step in profiled_steps(windows) if step < steps]] = False
    later = counted & (np.arange(steps) >= WARM_UP_STEPS)
    return later if later.any() else counted


def warm_up_counts(record: RunRecord) -> bool:
    """Whether a run was too short to leave the warm-up out of its means."""
    windows = windows_of(record)
    lengths = [len(steps) for steps in record.steps.values() if len(steps)]
    return any(not counted_steps(windows, length)[WARM_UP_STEPS:].any() for length in lengths)


def losses_of(record: RunRecord) -> list[float]:
    """The global mean loss of every step; not a number where a run has diverged, nothing where nobody told losses."""
    if record.steps and not any(steps.tells_loss for steps in record.steps.values()):
        return []
    losses = [loss for event in record.events_of("log") for loss in event["losses"]]
    return [float("nan") if loss is None else loss for loss in losses]
