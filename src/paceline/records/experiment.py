"""What an experiment leaves on disk: what was compared, the runs and where they are, proofs, failures, how it ended."""

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
    PROVENANCE,
    SOME,
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
"""What a reader relies on in an event of an experiment."""
MODES = ("strong", "weak", "both")
POINT_KINDS = {
    "mode": ValueKind(f"one of {', '.join(MODES)}", lambda value: value in MODES),
    "ranks": SOME,
    "hosts": SOME,
    "ranks_per_host": SOME,
    "batch": SOME,
    "batch_per_rank": POSITIVE,
}
"""Where a candidate stands in a scaling experiment."""


@dataclass(frozen=True)
class Candidate:
    """One of the things compared: a strategy, under settings."""

    name: str
    """What tables call it; no two in an experiment are called the same."""
    strategy: str
    settings: dict[str, Any] = field(default_factory=dict)
    """What `--vary` set for it."""
    role: CandidateRole = "candidate"
    """A bound exchanges nothing, so it cannot be picked; a baseline trains in one process; the rest are candidates."""
    lossless: bool = True
    point: dict[str, Any] | None = None
    """In a scaling experiment: how it scales (`mode`, which is `both` for what strong and weak scaling share), on how
    many `ranks` over how many `hosts`, `ranks_per_host`, and with which `batch` and `batch_per_rank`."""

    def to_dict(self) -> dict[str, Any]:
        """As a record has it: what is not a point of anything says nothing of one."""
        values = asdict(self)
        return values if self.point is not None else {key: value for key, value in values.items() if key != "point"}


@dataclass(frozen=True)
class ExperimentFolder:
    """The folder of an experiment while it goes on."""

    path: Path

    @classmethod
    def create(cls, path: Path, *, kind: str, candidates: Sequence[Candidate], **sections: Any) -> ExperimentFolder:
        """Makes the folder and says what will be done, refusing a folder that already holds a record."""
        for file in (schema.EXPERIMENT_FILE, schema.RUN_FILE):
            if (path / file).exists():
                raise RecordError(
                    f"{path} already holds a record.", hint="name another folder with --out, or remove it"
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
    """A run of an experiment."""

    candidate: Candidate
    repeat: int
    """From 0; runs of one repeat were made by the same processes, from the same seed."""
    run: RunRecord


@dataclass(frozen=True)
class ExperimentRecord:
    """An experiment as it stands on disk."""

    path: Path
    kind: str
    candidates: list[Candidate]
    config: dict[str, Any]
    """The settings that all runs share."""
    design: dict[str, Any]
    """How it was measured: ranks, repeats, when to stop."""
    provenance: dict[str, Any]
    events: list[dict[str, Any]]
    runs: list[ExperimentRun]
    examination: Examination | None = None
    """What the doctor found on the machine before it."""
    unread: list[str] = field(default_factory=list)
    """Sentences on what is damaged, and was left out, since the rest does without it."""

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind, in order."""
        return [event for event in self.events if event["event"] == kind]


def is_experiment(path: Path) -> bool:
    """Whether a folder holds an experiment, and not a run of its own."""
    return (path / schema.EXPERIMENT_FILE).is_file()


def read_experiment(path: Path) -> ExperimentRecord:
    """Reads an experiment, also one that was cut short or is still going on; runs that never started are left out."""
    if not is_experiment(path):
        raise RecordError(f"{path} holds no experiment: {schema.EXPERIMENT_FILE} is missing.")
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
    examination, unread = _examination_of(path)
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
        unread=unread,
    )


def _examination_of(path: Path) -> tuple[Examination | None, list[str]]:
    """What the doctor found; where it cannot be read, why: runs are compared without it."""
    try:
        return find_examination(path), []
    except RecordError as error:
        return None, [f"{error.message} What the doctor found is left out."]


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
        raise RecordError(f"{file} is damaged: {candidate.role!r} is not a role of a candidate.")
    texts = isinstance(candidate.name, str) and isinstance(candidate.strategy, str)
    if not texts or not isinstance(candidate.settings, dict) or not isinstance(candidate.lossless, bool):
        raise RecordError(f"{file} is damaged: a candidate's name, strategy, settings or promise cannot be read.")
    if candidate.point is not None:
        _check_point(candidate.point, file)
    return candidate


def _check_point(point: Any, file: Path) -> None:
    if not isinstance(point, dict):
        raise RecordError(f"{file} is damaged: the point of a candidate is not a JSON object.")
    check_kinds(point, POINT_KINDS, "the point of a candidate", file, needed=POINT_KINDS)
    if point["ranks"] != point["hosts"] * point["ranks_per_host"] or point["batch"] < point["ranks"]:
        raise RecordError(f"{file} is damaged: the ranks of a point do not fit its hosts, or its batch.")


def _check_event(event: Mapping[str, Any], known: Mapping[str, Candidate], file: Path) -> None:
    """Refuses an event that lacks what readers rely on, or is about a candidate that was not announced."""
    kind = event["event"]
    kinds = EVENT_KINDS.get(kind, {})
    check_kinds(event, kinds, f"an event {kind!r}", file, needed=kinds)
    name = event.get("candidate")
    if "candidate" in kinds and name not in known:
        raise RecordError(f"{file} is damaged: {schema.EXPERIMENT_FILE} does not know the candidate {name!r}.")


def _folder_of(event: Mapping[str, Any], path: Path) -> Path:
    """The folder of a run; a record from elsewhere must not bring folders in that are not its own."""
    folder = path / str(event["folder"])
    if path.resolve() not in folder.resolve().parents:
        raise RecordError(
            f"{path / schema.EVENTS_FILE} names a run outside of the experiment: {event['folder']}.",
            hint="name the folder of that run itself",
        )
    return folder
