"""Time of an epoch of a run: measured where whole epochs were trained, else extrapolated from the time of a step."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from paceline.analysis.steps.candidate_split import mean_split_of
from paceline.analysis.steps.timing import step_time, windows_of, windows_of_attempt
from paceline.analysis.summary import summarise_rank
from paceline.records import RunRecord
from paceline.records.events import LogEvent, StartEvent


@dataclass(frozen=True)
class EpochTime:
    """Seconds of one epoch of a run, and of its parts. The parts of computing and communicating overlap."""

    seconds: float
    data_s: float | None
    """Loading batches, averaged over ranks; None if nothing was recorded."""
    computing_s: float | None
    """Computing, also while communication is in progress; None without events, as the following."""
    communicating_s: float | None
    """Communicating, also while the rank computes."""
    exposed_s: float | None
    """Communicating while the rank computes nothing."""
    is_measured: bool
    """Whether a whole epoch was trained; otherwise it is the time per step × the steps of an epoch."""

    @property
    def without_data_s(self) -> float | None:
        """Seconds of an epoch without data loading."""
        return None if self.data_s is None else max(0.0, self.seconds - self.data_s)


def epoch_time(run: RunRecord, *, whole: bool) -> EpochTime | None:
    """Return the time of an epoch; None if no step was timed, or the length of an epoch is unknown.

    With `whole`, it is measured where a whole epoch was trained. Otherwise it is always extrapolated, so that short
    runs at several batch sizes are treated alike.
    """
    starts = run.events_of(StartEvent)
    steps = (starts[0].steps_per_epoch or None) if starts else None
    step_s = step_time(windows_of(run))
    measured_s = measured_epoch_s(run, steps) if whole and steps is not None else None
    if steps is None or (step_s is None and measured_s is None):
        return None
    seconds = measured_s if measured_s is not None else (step_s or 0.0) * steps
    data = [summarise_rank(rank, rows, windows_of_attempt(run)).data_s for rank, rows in run.steps.items() if len(rows)]
    known = [own for own in data if own is not None]
    split = mean_split_of(run)
    return EpochTime(
        seconds=seconds,
        data_s=statistics.fmean(known) * steps if known else None,
        computing_s=None if split is None else seconds * split.computing_s / split.step_s,
        communicating_s=None if split is None else seconds * split.communication_s / split.step_s,
        exposed_s=None if split is None else seconds * split.exposed_s / split.step_s,
        is_measured=measured_s is not None,
    )


def measured_epoch_s(run: RunRecord, steps_per_epoch: int) -> float | None:
    """Return the median wall time of the whole epochs, without the first if there are several; None if there is none.

    An epoch counts if its windows contain all of its steps and no others, and none of them was profiled.
    """
    logs: dict[int, list[LogEvent]] = {}
    for log in run.events_of(LogEvent):
        logs.setdefault(log.epoch, []).append(log)
    whole = [
        sum(log.wall_s for log in own)
        for own in logs.values()
        if sum(len(log.losses) for log in own) == steps_per_epoch
        and not any(log.profiled or len(set(log.epochs or [])) > 1 for log in own)
    ]
    return statistics.median(whole[1:] or whole) if whole else None
