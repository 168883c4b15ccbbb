"""Events of an experiment, and the folders of the runs that they name."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import RecordError
from paceline.records import schema
from paceline.records.events import (
    EXPERIMENT_EVENTS,
    CandidateEvent,
    ExperimentEvent,
    ScheduledEvent,
    read_undamaged_events,
)
from paceline.records.experiment.design import ExperimentDescription


def all_events_of(path: Path, description: ExperimentDescription) -> list[ExperimentEvent]:
    """Read all events, to continue the experiment; raise `RecordError` if one is damaged."""
    events, damaged = undamaged_events_of(path, description)
    if damaged:
        raise RecordError(
            f"{path / schema.EVENTS_FILE} is damaged: {damaged[0]}.",
            hint="an experiment goes on only if all its events can be read: name another folder with --out; "
            f"`paceline report {path}` shows what can be read",
        )
    return events


def undamaged_events_of(path: Path, description: ExperimentDescription) -> tuple[list[ExperimentEvent], list[str]]:
    """Return the events of an experiment, and clauses on those that are damaged or name a candidate there is not."""
    names = {candidate.name for candidate in description.candidates}
    events, damaged = read_undamaged_events(path / schema.EVENTS_FILE, EXPERIMENT_EVENTS)
    unknown = [
        event.candidate for event in events if isinstance(event, CandidateEvent) and event.candidate not in names
    ]
    damaged += [f"{schema.EXPERIMENT_FILE} does not list the candidate {name!r}" for name in unknown]
    return [
        event for event in events if not (isinstance(event, CandidateEvent) and event.candidate in unknown)
    ], damaged


def folder_of(event: ScheduledEvent, path: Path) -> Path:
    """Return the folder of a run; raise `RecordError` if it lies outside the experiment (records may be untrusted)."""
    folder = path / event.folder
    try:
        inside = path.resolve() in folder.resolve().parents
    except (OSError, RuntimeError, ValueError):  # A loop of links, a null byte.
        inside = False
    if not inside:
        raise RecordError(
            f"{path / schema.EVENTS_FILE} names a run outside the experiment: {event.folder!r}.",
            hint="name the folder of that run directly",
        )
    return folder
