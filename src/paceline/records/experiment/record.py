"""An experiment, read from disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import RecordError
from paceline.formatting import plural
from paceline.records import schema
from paceline.records.decoder import exists
from paceline.records.events import (
    EndEvent,
    EventT,
    ExperimentEvent,
    ScheduledEvent,
    events_of,
)
from paceline.records.examination import Examination, find_examination
from paceline.records.experiment.continuation import (
    part_of,
    standing_events,
)
from paceline.records.experiment.design import Candidate, Design, ExperimentDescription, is_experiment, read_description
from paceline.records.experiment.events import folder_of, undamaged_events_of
from paceline.records.provenance import Provenance
from paceline.records.reader import RunRecord, read_usable_run
from paceline.records.settings import Settings


@dataclass(frozen=True)
class ExperimentRun:
    """One run of an experiment."""

    candidate: Candidate
    repeat: int
    """Number of the repeat, from 0. Runs of one repeat share processes and seed."""
    run: RunRecord
    part: int = 0
    """Number of the continuation in which it was measured; 0 before the first. Runs of one repeat that are in different
    parts were not measured together."""


@dataclass(frozen=True)
class ExperimentRecord:
    """An experiment read from disk."""

    path: Path
    kind: str
    candidates: list[Candidate]
    config: Settings
    """Settings that all runs share."""
    design: Design
    """Design of the measurement: ranks, repeats, stopping rule."""
    provenance: Provenance
    events: list[ExperimentEvent]
    """Events that still hold: without the interruption of an experiment that was continued, for example."""
    runs: list[ExperimentRun]
    examination: Examination | None = None
    """Examination of the machine before the experiment; None if there was none."""
    read_warnings: list[str] = field(default_factory=list)
    """Sentences on damaged parts that were skipped."""

    @property
    def finished(self) -> bool:
        """Whether the experiment ended by itself: it was not interrupted, killed or stopped by an error."""
        return bool(self.events_of(EndEvent))

    def events_of(self, kind: type[EventT]) -> list[EventT]:
        """Return the events of one type, in order."""
        return events_of(self.events, kind)


def read_experiment(path: Path) -> ExperimentRecord:
    """Read an experiment, also an interrupted one or one in progress; runs that never started are omitted.

    So are runs and events that are damaged; `read_warnings` says which these are. Raise `RecordError` only if the
    experiment's own description cannot be read.
    """
    if not is_experiment(path):
        raise RecordError(f"{path} contains no experiment: {schema.EXPERIMENT_FILE} is missing.")
    found = read_description(path / schema.EXPERIMENT_FILE)
    by_name = {candidate.name: candidate for candidate in found.candidates}
    events, read_warnings = _read_usable_events(path, found)
    examination, examination_warnings = _examination_of(path)
    runs: list[ExperimentRun] = []
    for event in events_of(events, ScheduledEvent):
        try:
            run = _read_scheduled_run(event, path)
        except RecordError as error:
            read_warnings.append(f"{error.message} The report omits this run of {event.candidate}.")
            continue
        if run is not None:
            runs.append(ExperimentRun(by_name[event.candidate], event.repeat, run, part_of(event.folder, events)))
            read_warnings += run.read_warnings
    return ExperimentRecord(
        path=path,
        kind=found.kind,
        candidates=found.candidates,
        config=found.config,
        design=found.design,
        provenance=found.provenance,
        events=standing_events(events),
        runs=runs,
        examination=examination,
        read_warnings=read_warnings + examination_warnings,
    )


def _read_scheduled_run(event: ScheduledEvent, path: Path) -> RunRecord | None:
    """Read a run of the experiment in a folder; None if it never started. Raise `RecordError` if it is damaged."""
    folder = folder_of(event, path)
    if exists(folder / schema.RUN_FILE):
        return read_usable_run(folder)
    if exists(folder / schema.SUMMARY_FILE):
        raise RecordError(f"{folder} is damaged: {schema.RUN_FILE} is missing.")
    return None


def _read_usable_events(path: Path, description: ExperimentDescription) -> tuple[list[ExperimentEvent], list[str]]:
    """Read the events that are not damaged, to report them; return them and a warning if others are."""
    try:
        events, damaged = undamaged_events_of(path, description)
    except RecordError as error:
        return [], [f"{error.message} The report omits all events of the experiment, and so its runs."]
    if not damaged:
        return events, []
    more = f"; so are {plural(len(damaged) - 1, 'other event')}" if len(damaged) > 1 else ""
    return events, [f"{path / schema.EVENTS_FILE} is damaged: {damaged[0]}{more}. The report omits what is damaged."]


def _examination_of(path: Path) -> tuple[Examination | None, list[str]]:
    """Return the examination, and a warning if it cannot be read: runs can be compared without it."""
    try:
        return find_examination(path), []
    except RecordError as error:
        return None, [f"{error.message} The report omits the examination by `paceline doctor`."]
