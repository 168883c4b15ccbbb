"""Cost of checkpoints: the time for which training waits, and slower steps while one is written in the background."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from paceline.records.events import CheckpointEvent, LogEvent
from paceline.records.reader import RunRecord


@dataclass(frozen=True)
class CheckpointCost:
    """Cost of all checkpoints of a run."""

    written: int
    failed: int
    bytes: float
    """Mean size of a checkpoint on disk."""
    stall_s: float
    """Seconds for which training waited, in total."""
    slowed_s: float
    """Seconds that steps took longer while a checkpoint was written, in total; 0 if that cannot be seen."""
    train_s: float
    """Seconds of training, without waits for checkpoints."""

    @property
    def share(self) -> float:
        """Share of the run's time that checkpoints cost."""
        return (self.stall_s + self.slowed_s) / (self.train_s + self.stall_s)


def checkpoint_cost(run: RunRecord) -> CheckpointCost | None:
    """Return the cost of a run's checkpoints; None if it has written none, or has no step."""
    events, logs = run.events_of(CheckpointEvent), run.events_of(LogEvent)
    if not events or not logs:
        return None
    written = [event for event in events if event.error is None]
    return CheckpointCost(
        written=len(written),
        failed=len(events) - len(written),
        bytes=statistics.fmean(event.bytes for event in written) if written else 0.0,
        stall_s=sum(event.stall_s for event in events),
        slowed_s=_slowed_s(events, logs),
        train_s=sum(log.wall_s for log in logs),
    )


def _slowed_s(events: list[CheckpointEvent], logs: list[LogEvent]) -> float:
    """Return the time that windows beside a write took longer than they would by the median of the others.

    It is the difference of noisy times, so it may come out negative, and is then taken as 0.
    """
    writes = [
        (event.started_s + event.stall_s, event.started_s + event.stall_s + event.write_s)
        for event in events
        if event.is_async and event.write_s is not None
    ]
    timed = [log for log in logs[1:] if not log.profiled and not log.warm_up]
    beside = [
        any(start_s < log.time_s and log.time_s - log.wall_s < end_s for start_s, end_s in writes) for log in timed
    ]
    usual = [log.wall_s / len(log.losses) for log, is_beside in zip(timed, beside, strict=True) if not is_beside]
    if not usual or not any(beside):
        return 0.0
    step_s = statistics.median(usual)
    slowed = [log.wall_s - len(log.losses) * step_s for log, found in zip(timed, beside, strict=True) if found]
    return max(0.0, sum(slowed))
