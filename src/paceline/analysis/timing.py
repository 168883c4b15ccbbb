"""Time per iteration, as every table defines it: whole windows, the first never counted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from paceline.records.reader import RunRecord


class WindowTime(NamedTuple):
    """Steps that were timed as one: from the first's start until nothing is in flight any more."""

    steps: int
    wall_s: float
    """On the slowest rank."""


def step_time(windows: Sequence[WindowTime]) -> float | None:
    """The median over the windows but the first of wall time ÷ steps; None where only a warm-up was done."""
    times = [window.wall_s / window.steps for window in windows[1:]]
    return statistics.median(times) if times else None


def windows_of(record: RunRecord) -> list[WindowTime]:
    """The windows of a run, those of one that was cut short too."""
    return [WindowTime(len(event["losses"]), event["wall_s"]) for event in record.events_of("log")]


def losses_of(record: RunRecord) -> list[float]:
    """The global mean loss of every step; not a number where a run has diverged, nothing where nobody told losses."""
    if record.steps and not any(steps.tells_loss for steps in record.steps.values()):
        return []
    losses = [loss for event in record.events_of("log") for loss in event["losses"]]
    return [float("nan") if loss is None else loss for loss in losses]
