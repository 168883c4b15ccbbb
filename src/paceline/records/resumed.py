"""Record of a run that resumed: which events count, and where the files of its earlier attempts are.

The file of events only grows. When a run resumes at step N, the events of later steps stay in the file, but they no
longer count: those steps are trained again. The files of ranks, which have one row per step, are those of the last
attempt; the others are moved to `attempt-NUMBER`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.records import schema
from paceline.records.events import (
    RUN_EVENTS,
    CheckpointEvent,
    ConfigEvent,
    EndEvent,
    EpochEvent,
    EvaluationEvent,
    LogEvent,
    ResumedEvent,
    RunEvent,
    StartEvent,
    events_of,
    read_events,
)
from paceline.records.step_counter import read_step_count

_FILES_OF_ATTEMPT = (
    "rank-*.csv",
    "timeline-*.bin",
    "resources-*.csv",
    "marks-*.csv",
    "profile-*",
    schema.RUN_FILE,
    schema.SUMMARY_FILE,
    schema.FINISHED_FILE,
)


def counting_events(events: Sequence[RunEvent]) -> list[RunEvent]:
    """Return the events without those of steps that were trained again, and without the starts of earlier attempts.

    Of the same evaluation, or end of an epoch, in several attempts, the last one counts.
    """
    counting: list[RunEvent] = []
    for event in events:
        if isinstance(event, ResumedEvent):
            counting = [earlier for earlier in counting if _counts_at(earlier, event.step)]
        elif isinstance(event, ConfigEvent | StartEvent):
            counting = [earlier for earlier in counting if type(earlier) is not type(event)]
        counting.append(event)
    if not events_of(events, ResumedEvent):
        return counting
    last = {_subject(event, place): place for place, event in enumerate(counting)}
    return [event for place, event in enumerate(counting) if last[_subject(event, place)] == place]


def _subject(event: RunEvent, place: int) -> tuple[type, int | None]:
    """Return a key that is the same for events that describe the same: two attempts may evaluate after the same step.

    A run that resumes at its last step does so, because that evaluation follows the last checkpoint.
    """
    if isinstance(event, EvaluationEvent):
        return EvaluationEvent, event.step
    if isinstance(event, EpochEvent):
        return EpochEvent, event.epoch
    return object, place


def _counts_at(event: RunEvent, step: int) -> bool:
    """Return whether an event still counts after the run has resumed at a step."""
    if isinstance(event, LogEvent | EpochEvent | CheckpointEvent):
        return event.step <= step
    if isinstance(event, EvaluationEvent):
        return event.step is not None and event.step <= step
    return not isinstance(event, EndEvent)


@dataclass(frozen=True)
class History:
    """Part of a record that covers the steps before the one at which the run resumes."""

    events: list[RunEvent]
    """Events up to that step, in order."""
    time_s: float
    """Time of the last event of the earlier attempts: the clock of the record goes on from there."""
    redone: int
    """Steps after that step that were trained, and are trained again."""
    attempt: int
    """Number of the attempt that wrote the record so far, from 1."""

    @property
    def logs(self) -> list[LogEvent]:
        """Windows of steps before the one at which it resumes."""
        return events_of(self.events, LogEvent)


def read_history(folder: Path, step: int) -> History:
    """Return the part of a record that covers the steps before `step`; an empty history if the folder has no record."""
    written = read_events(folder / schema.EVENTS_FILE, RUN_EVENTS)
    every = counting_events(written)
    logs = events_of(every, LogEvent)
    done = max(logs[-1].step, read_step_count(folder)) if logs else 0
    return History(
        events=[event for event in every if _counts_at(event, step)],
        time_s=every[-1].time_s if every else 0.0,
        redone=max(0, done - step),
        attempt=1 + len(events_of(written, ResumedEvent)),
    )


def set_attempt_aside(folder: Path, attempt: int) -> None:
    """Move the files of ranks, and what describes the whole run, to the folder of the attempt that wrote them."""
    aside = folder / schema.attempt_folder(attempt)
    for file in [file for pattern in _FILES_OF_ATTEMPT for file in folder.glob(pattern)]:
        aside.mkdir(exist_ok=True)
        file.replace(aside / file.name)
