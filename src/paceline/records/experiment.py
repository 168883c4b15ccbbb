"""Record of an experiment on disk: candidates, runs and their folders, parity proofs, failures, outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from paceline.errors import RecordError
from paceline.records import schema
from paceline.records.examination import Examination, find_examination
from paceline.records.reader import RunRecord, check_schema, read_events, read_json, read_run
from paceline.records.value_checks import (
    COUNT,
    DESIGN,
    FLAG,
    NUMBER,
    POSITIVE,
    POSITIVE_COUNT,
    PROVENANCE,
    TEXT,
    ValueKind,
    check_kinds,
)
from paceline.records.writer import write_json

CandidateRole = Literal["candidate", "bound", "baseline"]

EVENT_KINDS = {
    "run": {"candidate": TEXT, "repeat": COUNT, "folder": TEXT},
    "parity": {
        "candidate": TEXT,
        "error": NUMBER.or_null,
        "tolerance": NUMBER,
        "lossless": FLAG,
        "ranks": COUNT,
        "steps": COUNT,
    },
    "failure": {"candidate": TEXT, "message": TEXT},
    "unproven": {"reason": TEXT},
}
"""Values that readers require in each kind of event of an experiment."""
MODES = ("strong", "weak", "both")
POINT_KINDS = {
    "mode": ValueKind(f"one of {', '.join(MODES)}", lambda value: value in MODES),
    "ranks": POSITIVE_COUNT,
    "hosts": POSITIVE_COUNT,
    "ranks_per_host": POSITIVE_COUNT,
    "batch": POSITIVE_COUNT,
    "batch_per_rank": POSITIVE,
}
"""Values of `Candidate.point`."""


@dataclass(frozen=True)
class Candidate:
    """A strategy with one set of settings, compared with others in an experiment."""

    name: str
    """Name in tables; unique within an experiment."""
    strategy: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings from `--vary`."""
    role: CandidateRole = "candidate"
    """`bound` exchanges nothing, so it is never recommended; `baseline` trains in one process; else `candidate`."""
    lossless: bool = True
    point: dict[str, Any] | None = None
    """Position in a scaling experiment: `mode` (`strong`, `weak`, or `both` if the two modes share the run), `ranks`,
    `hosts`, `ranks_per_host`, `batch` and `batch_per_rank`. None in other experiments."""

    def to_dict(self) -> dict[str, Any]:
        """Return the candidate as JSON values, without `point` if it is None."""
        values = asdict(self)
        return values if self.point is not None else {key: value for key, value in values.items() if key != "point"}


@dataclass(frozen=True)
class ExperimentFolder:
    """Folder of an experiment that is being written."""

    path: Path

    @classmethod
    def create(cls, path: Path, *, kind: str, candidates: Sequence[Candidate], **sections: Any) -> ExperimentFolder:
        """Create the folder and write `experiment.json`; raise `RecordError` if the folder contains a record."""
        for file in (schema.EXPERIMENT_FILE, schema.RUN_FILE):
            if (path / file).exists():
                raise RecordError(
                    f"{path} already contains a record.", hint="name another folder with --out, or remove this one"
                )
        try:
            path.mkdir(parents=True, exist_ok=True)
            described = {"schema": schema.SCHEMA_VERSION, "kind": kind, "candidates": [c.to_dict() for c in candidates]}
            write_json(path / schema.EXPERIMENT_FILE, described | sections)
        except OSError as error:
            hint = "name another folder with --out"
            raise RecordError(f"cannot write to {path}: {error.strerror}.", hint=hint) from None
        return cls(path)


@dataclass(frozen=True)
class ExperimentRun:
    """One run of an experiment."""

    candidate: Candidate
    repeat: int
    """Number of the repeat, from 0. Runs of one repeat share processes and seed."""
    run: RunRecord


@dataclass(frozen=True)
class ExperimentRecord:
    """An experiment read from disk."""

    path: Path
    kind: str
    candidates: list[Candidate]
    config: dict[str, Any]
    """Settings that all runs share."""
    design: dict[str, Any]
    """Design of the measurement: ranks, repeats, stopping rule."""
    provenance: dict[str, Any]
    events: list[dict[str, Any]]
    runs: list[ExperimentRun]
    examination: Examination | None = None
    """Examination of the machine before the experiment; None if there was none."""
    read_warnings: list[str] = field(default_factory=list)
    """Sentences on damaged parts that were skipped."""

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind, in order."""
        return [event for event in self.events if event["event"] == kind]


def is_experiment(path: Path) -> bool:
    """Return whether a folder contains an experiment."""
    return (path / schema.EXPERIMENT_FILE).is_file()


def read_experiment(path: Path) -> ExperimentRecord:
    """Read an experiment, also an interrupted one or one in progress; runs that never started are omitted."""
    if not is_experiment(path):
        raise RecordError(f"{path} contains no experiment: {schema.EXPERIMENT_FILE} is missing.")
    content = read_json(path / schema.EXPERIMENT_FILE)
    check_schema(content, path / schema.EXPERIMENT_FILE, {"kind", "candidates", "config", "design", "provenance"})
    check_kinds(content["design"], DESIGN, "its design", path / schema.EXPERIMENT_FILE)
    check_kinds(content["provenance"], PROVENANCE, "its provenance", path / schema.EXPERIMENT_FILE)
    candidates = _candidates(content["candidates"], path / schema.EXPERIMENT_FILE)
    by_name = {candidate.name: candidate for candidate in candidates}
    events = read_events(path / schema.EVENTS_FILE)
    for event in events:
        _check_event(event, by_name, path / schema.EVENTS_FILE)
    started = [(event, _folder_of(event, path)) for event in events if event["event"] == "run"]
    examination, read_warnings = _examination_of(path)
    runs = [
        ExperimentRun(by_name[event["candidate"]], event["repeat"], read_run(folder))
        for event, folder in started
        if (folder / schema.RUN_FILE).is_file()
    ]
    return ExperimentRecord(
        path=path,
        kind=content["kind"],
        candidates=candidates,
        config=content["config"],
        design=content["design"],
        provenance=content["provenance"],
        events=events,
        runs=runs,
        examination=examination,
        read_warnings=read_warnings,
    )


def _examination_of(path: Path) -> tuple[Examination | None, list[str]]:
    """Return the examination, and a warning if it cannot be read: runs can be compared without it."""
    try:
        return find_examination(path), []
    except RecordError as error:
        return None, [f"{error.message} The report omits the examination by `paceline doctor`."]


def _candidates(entries: Any, file: Path) -> list[Candidate]:
    if not isinstance(entries, list):
        raise RecordError(f"{file} is damaged: its candidates are not a list.")
    candidates = [_candidate(entry, file) for entry in entries]
    if len({candidate.name for candidate in candidates}) < len(candidates):
        raise RecordError(f"{file} is damaged: two candidates have the same name.")
    return candidates


def _candidate(entry: Any, file: Path) -> Candidate:
    try:
        candidate = Candidate(**entry)
    except TypeError as error:
        raise RecordError(f"{file} is damaged: {error}.") from None
    if candidate.role not in get_args(CandidateRole):
        raise RecordError(f"{file} is damaged: {candidate.role!r} is not a role.")
    texts = isinstance(candidate.name, str) and isinstance(candidate.strategy, str)
    if not texts or not isinstance(candidate.settings, dict) or not isinstance(candidate.lossless, bool):
        raise RecordError(
            f"{file} is damaged: the name, strategy, settings or lossless flag of a candidate has a wrong type."
        )
    if candidate.point is not None:
        _check_point(candidate.point, file)
    return candidate


def _check_point(point: Any, file: Path) -> None:
    if not isinstance(point, dict):
        raise RecordError(f"{file} is damaged: the point of a candidate is not a JSON object.")
    check_kinds(point, POINT_KINDS, "the point of a candidate", file, needed=POINT_KINDS)
    if point["ranks"] != point["hosts"] * point["ranks_per_host"] or point["batch"] < point["ranks"]:
        raise RecordError(
            f"{file} is damaged: the ranks of a point are not hosts × ranks_per_host, or exceed its batch."
        )


def _check_event(event: Mapping[str, Any], known: Mapping[str, Candidate], file: Path) -> None:
    """Raise `RecordError` if an event lacks a required value or names an unknown candidate."""
    kind = event["event"]
    kinds = EVENT_KINDS.get(kind, {})
    check_kinds(event, kinds, f"an event {kind!r}", file, needed=kinds)
    name = event.get("candidate")
    if "candidate" in kinds and name not in known:
        raise RecordError(f"{file} is damaged: {schema.EXPERIMENT_FILE} does not list the candidate {name!r}.")


def _folder_of(event: Mapping[str, Any], path: Path) -> Path:
    """Return the folder of a run; raise `RecordError` if it lies outside the experiment (records may be untrusted)."""
    folder = path / str(event["folder"])
    if path.resolve() not in folder.resolve().parents:
        raise RecordError(
            f"{path / schema.EVENTS_FILE} names a run outside the experiment: {event['folder']}.",
            hint="name the folder of that run directly",
        )
    return folder
