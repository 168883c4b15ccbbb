"""Record of an experiment on disk: candidates, runs and their folders, parity proofs, failures, outcome."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
from filelock import BaseFileLock, FileLock, Timeout
from msgspec import Struct

from paceline.errors import DivergenceError, RecordError
from paceline.records import schema
from paceline.records.continuation import (
    already_finished,
    changed_code,
    check_same,
    continued_design,
    failures_of,
    is_finished,
    most_repeats,
    part_of,
    standing_events,
    user_code_of,
)
from paceline.records.decoder import VersionedFile, read_model
from paceline.records.events import (
    EXPERIMENT_EVENTS,
    CandidateEvent,
    ContinuedEvent,
    EndEvent,
    EventT,
    ExperimentEvent,
    FailureEvent,
    ScheduledEvent,
    events_of,
    read_events,
)
from paceline.records.examination import Examination, find_examination
from paceline.records.provenance import Provenance
from paceline.records.reader import RunRecord, is_complete, read_run
from paceline.records.settings import Settings, check_settings
from paceline.records.value_types import Count, NotNegative, Positive, PositiveCount
from paceline.records.writer import write_json

CandidateRole = Literal["candidate", "bound", "baseline"]
PointMode = Literal["strong", "weak", "both", "batch"]


class CandidatePoint(Struct, frozen=True, kw_only=True):
    """Position of a candidate in an experiment over ranks or batch sizes."""

    mode: PointMode
    """Scaling mode; `both` if the two modes share the run, `batch` in an experiment over batch sizes."""
    ranks: PositiveCount
    hosts: PositiveCount
    ranks_per_host: PositiveCount
    batch: PositiveCount
    """Global batch."""
    batch_per_rank: PositiveCount | Positive
    """Batch ÷ ranks; not whole if the shares are uneven."""


class Candidate(Struct, frozen=True):
    """A strategy with one set of settings, compared with others in an experiment."""

    name: str
    """Name in tables; unique within an experiment."""
    strategy: str
    settings: Settings = {}
    """Settings from `--vary`."""
    role: CandidateRole = "candidate"
    """`bound` exchanges nothing, so it is never recommended; `baseline` trains in one process; else `candidate`."""
    lossless: bool = True
    point: CandidatePoint | None = None
    """None in a comparison."""

    def to_dict(self) -> dict[str, Any]:
        """Return the candidate as JSON values, without `point` if it is None."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values if self.point is not None else {key: value for key, value in values.items() if key != "point"}


class Design(Struct, frozen=True, kw_only=True):
    """Design of the measurements of an experiment."""

    may_change: ClassVar[frozenset[str]] = frozenset(
        {"repeats", "max_repeats", "interim_analyses", "reference", "target", "requested_threads"}
    )
    """Fields that may differ when an experiment goes on: more repeats, estimates, and what follows from the rest."""

    ranks: PositiveCount
    """Largest world size."""
    hosts: PositiveCount
    threads: PositiveCount
    """Compute threads per rank."""
    requested_threads: PositiveCount | None
    """Value of `--threads`; None if it was not given."""
    repeats: Count
    """Least number of repeats."""
    max_repeats: Count
    interim_analyses: Count
    """Number of times that the experiment may check for a winner."""
    reference: str | None
    """Candidate that ratios are relative to."""
    proof: bool
    """Whether parity is tested first."""
    target: str = ""
    """Name of the workload, or the command line of the script."""
    batch: PositiveCount | None
    """Global batch (of strong scaling); None if it varies or a script sets it."""
    emulated: str | None
    """Value of `--emulate`; None on real hosts."""
    host_cpus: Positive | None
    """Cores that the ranks of one emulated host share; None for no limit."""


class CompareDesign(Design, frozen=True, kw_only=True):
    """Design of a comparison."""

    ranks_per_host: PositiveCount
    machine_cores: Positive | None = None
    """Cores of this machine that may be used; None in records of older versions."""
    machines: list[Count] = []
    """Number of the machine of each host: hosts on one machine share its cores."""
    ranks_pinned: bool = False
    """Whether a launcher bound ranks to cores."""
    gpus: Count = 0
    """GPUs of this host that ranks may use; 0 on CPUs."""


class ScaleShape(Struct, frozen=True, kw_only=True):
    """Ranks and hosts of some points."""

    hosts: PositiveCount
    ranks_per_host: PositiveCount


class PointsDesign(Design, frozen=True, kw_only=True):
    """Design of an experiment whose candidates are points: strategies on several shapes of ranks."""

    may_change: ClassVar[frozenset[str]] = Design.may_change | {"requested_ranks_per_host", "single_threads"}

    shapes: list[ScaleShape]
    strategies: list[str]
    requested_ranks_per_host: list[PositiveCount]
    """Value of `--ranks-per-host`; empty if it was not given."""
    single_threads: PositiveCount | None = None
    """Compute threads of `single`, which has what one host has; None in records of older versions."""
    machines: list[Count]
    """Number of the machine of each host: hosts on one machine share its cores."""
    machine_cores: Positive
    ranks_pinned: bool
    """Whether a launcher bound ranks to cores."""
    gpus: Count
    """GPUs of this host that ranks may use; 0 on CPUs."""


class ScaleDesign(PointsDesign, frozen=True, kw_only=True):
    """Design of a scaling experiment."""

    modes: list[str]
    """`strong`, `weak` or both."""
    batch_per_rank: PositiveCount
    """Batch per rank of weak scaling."""


class BatchDesign(PointsDesign, frozen=True, kw_only=True):
    """Design of an experiment over batch sizes."""

    may_change: ClassVar[frozenset[str]] = PointsDesign.may_change | {"core_flop_per_s", "core_other_load"}

    sizes: list[PositiveCount]
    """Batch sizes, ascending."""
    per_rank: bool
    """Whether the sizes are per rank; otherwise they are global batches."""
    trains: bool
    """Whether runs train for whole epochs or a time, so that their losses and accuracies are compared."""
    core_flop_per_s: Positive | None
    """FLOP per second of one core in a matrix product, in the number format of the runs; None if it was not measured,
    as on a GPU."""
    core_other_load: NotNegative | None = None
    """Cores that other programs used while `core_flop_per_s` was measured; None if it is unknown."""
    left_out: list[str] = []
    """Sentences on sizes that do not fit some ranks or the data, so that they are not measured."""


class ExperimentDescription(VersionedFile, frozen=True, kw_only=True):
    """Content of `experiment.json`."""

    kind: str
    """`compare`, `scale` or `batch`."""
    candidates: list[Candidate]
    config: Settings
    """Settings that all runs share."""
    design: Design
    provenance: Provenance
    user_code: dict[str, str | None] = msgspec.field(default_factory=dict)
    """Digest by file of the user's code: modules, and the script."""


class CompareDescription(ExperimentDescription, frozen=True, kw_only=True):
    """Content of `experiment.json` of a comparison."""

    design: CompareDesign


class ScaleDescription(ExperimentDescription, frozen=True, kw_only=True):
    """Content of `experiment.json` of a scaling experiment."""

    design: ScaleDesign


class BatchDescription(ExperimentDescription, frozen=True, kw_only=True):
    """Content of `experiment.json` of an experiment over batch sizes."""

    design: BatchDesign


DESCRIPTIONS: dict[str, type[ExperimentDescription]] = {
    schema.COMPARE_KIND: CompareDescription,
    schema.SCALE_KIND: ScaleDescription,
    schema.BATCH_KIND: BatchDescription,
}


class _KindOnly(VersionedFile, frozen=True, kw_only=True):
    kind: str


@dataclass(frozen=True)
class EarlierParts:
    """Contents of an experiment that goes on, from before."""

    events: list[ExperimentEvent]
    kept: dict[str, ScheduledEvent]
    """Complete runs by folder. All others are measured again."""
    failed: list[str]
    """Candidates that failed; they are tried again."""
    diverged: list[FailureEvent]
    """Failures of candidates that diverged. They stay left out, since the same seed would diverge again."""
    reproved: set[str]
    """Candidates whose proof no longer holds, since their code has changed."""

    @property
    def parts(self) -> int:
        """Number of earlier commands that measured in this folder."""
        return 1 + len(events_of(self.events, ContinuedEvent))

    @property
    def repeats(self) -> int:
        """Number of repeats that have begun."""
        return max((event.repeat + 1 for event in self.kept.values()), default=0)

    @property
    def last_event_s(self) -> float:
        """Time of the last event."""
        return max((event.time_s for event in self.events), default=0.0)


@dataclass(frozen=True)
class ExperimentFolder:
    """Folder of an experiment that is being written. Only one process at a time may write it."""

    path: Path
    lock: BaseFileLock | None = field(default=None, compare=False)
    """Lock that this process holds; the kernel releases it when the process ends, even if it is killed."""
    earlier: EarlierParts | None = None
    """Contents from before, if the experiment goes on; None for a new one."""

    @classmethod
    def create(cls, path: Path, description: ExperimentDescription) -> ExperimentFolder:
        """Create the folder of an experiment, or open that of the same experiment to continue it.

        Raise `RecordError` if the folder contains any other record, if the experiment in it is finished, or if another
        process is writing it. The folder is then left as it is.
        """
        if (path / schema.RUN_FILE).exists():
            raise RecordError(
                f"{path} already contains a record.", hint="name another folder with --out, or remove this one"
            )
        code = user_code_of(description.candidates, description.config)
        description = msgspec.structs.replace(description, user_code=code)
        with ExitStack() as on_error:
            try:
                path.mkdir(parents=True, exist_ok=True)
                lock = _lock(path)
                on_error.callback(lock.release)
                earlier, description = _continue(path, description) if is_experiment(path) else (None, description)
                write_json(path / schema.EXPERIMENT_FILE, description)
            except OSError as error:
                hint = "name another folder with --out"
                raise RecordError(f"cannot write to {path}: {error.strerror}.", hint=hint) from None
            on_error.pop_all()
        return cls(path, lock, earlier)

    def set_aside(self, folder: Path) -> None:
        """Move what an earlier command left in a folder out of the way, so that no record contains parts of two."""
        if self.earlier is None or not folder.is_dir() or not any(folder.iterdir()):
            return
        target = self.path / schema.INCOMPLETE_FOLDER.format(self.earlier.parts) / folder.relative_to(self.path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(target)
        except OSError as error:
            raise RecordError(f"cannot move {folder} to {target}: {error.strerror}.") from None

    def close(self) -> None:
        """Release the lock."""
        if self.lock is not None:
            self.lock.release()


def _lock(path: Path) -> BaseFileLock:
    lock = FileLock(path / schema.LOCK_FILE)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise RecordError(
            f"another process is measuring in {path}.", hint="wait for its end, or name another folder with --out"
        ) from None
    return lock


def _continue(path: Path, new: ExperimentDescription) -> tuple[EarlierParts, ExperimentDescription]:
    """Return the contents of an unfinished experiment, and its description; raise if it is another or finished."""
    old = _read_description(path / schema.EXPERIMENT_FILE)
    check_same(path, old, new)
    events = _read_events(path, old)
    scheduled = {event.folder: event for event in events_of(events, ScheduledEvent)}
    kept = {folder: event for folder, event in scheduled.items() if is_complete(_folder_of(event, path))}
    stopped = {event.candidate: folder for folder, event in kept.items() if not _is_finished_run(path / folder)}
    failures = failures_of(events)
    diverged = {name for name, event in failures.items() if event.kind == DivergenceError.__name__ and name in stopped}
    failed = [name for name in failures if name not in diverged]
    more_repeats = new.design.repeats > old.design.repeats or most_repeats(new.design) > most_repeats(old.design)
    if is_finished(events) and not more_repeats:
        raise already_finished(path, len(kept), failed)
    finished = {event.candidate for folder, event in kept.items() if _is_finished_run(path / folder)}
    reproved = changed_code(old, new, finished)
    diverged -= reproved  # With other code, a candidate may train.
    for name in stopped.keys() - diverged:
        del kept[stopped[name]]
    description = msgspec.structs.replace(
        old, design=continued_design(old.design, new.design), user_code=old.user_code | new.user_code
    )
    return EarlierParts(
        events=events,
        kept=kept,
        failed=[name for name in failures if name not in diverged],
        diverged=[event for name, event in failures.items() if name in diverged],
        reproved=reproved,
    ), description


def _is_finished_run(folder: Path) -> bool:
    return (folder / schema.FINISHED_FILE).is_file()


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


def is_experiment(path: Path) -> bool:
    """Return whether a folder contains an experiment."""
    return (path / schema.EXPERIMENT_FILE).is_file()


def read_experiment(path: Path) -> ExperimentRecord:
    """Read an experiment, also an interrupted one or one in progress; runs that never started are omitted."""
    if not is_experiment(path):
        raise RecordError(f"{path} contains no experiment: {schema.EXPERIMENT_FILE} is missing.")
    found = _read_description(path / schema.EXPERIMENT_FILE)
    by_name = {candidate.name: candidate for candidate in found.candidates}
    events = _read_events(path, found)
    scheduled = [(event, _folder_of(event, path)) for event in events_of(events, ScheduledEvent)]
    examination, read_warnings = _examination_of(path)
    runs = [
        ExperimentRun(by_name[event.candidate], event.repeat, read_run(folder), part_of(event.folder, events))
        for event, folder in scheduled
        if (folder / schema.RUN_FILE).is_file()
    ]
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
        read_warnings=read_warnings,
    )


def _read_events(path: Path, description: ExperimentDescription) -> list[ExperimentEvent]:
    """Read all events; raise `RecordError` for one that names a candidate that there is not."""
    names = {candidate.name for candidate in description.candidates}
    events: list[ExperimentEvent] = read_events(path / schema.EVENTS_FILE, EXPERIMENT_EVENTS)
    for event in events:
        if isinstance(event, CandidateEvent) and event.candidate not in names:
            raise RecordError(
                f"{path / schema.EVENTS_FILE} is damaged: {schema.EXPERIMENT_FILE} does not list the candidate "
                f"{event.candidate!r}."
            )
    return events


def _examination_of(path: Path) -> tuple[Examination | None, list[str]]:
    """Return the examination, and a warning if it cannot be read: runs can be compared without it."""
    try:
        return find_examination(path), []
    except RecordError as error:
        return None, [f"{error.message} The report omits the examination by `paceline doctor`."]


def _read_description(file: Path) -> ExperimentDescription:
    """Read `experiment.json`; its kind determines the type of its design."""
    kind = read_model(file, _KindOnly, "experiment").kind
    found = read_model(file, DESCRIPTIONS.get(kind, ExperimentDescription), "experiment")
    check_settings(found.config, "experiment.config", file)
    if len({candidate.name for candidate in found.candidates}) < len(found.candidates):
        raise RecordError(f"{file} is damaged: two of experiment.candidates have the same name.")
    for number, candidate in enumerate(found.candidates):
        place = f"experiment.candidates[{number}]"
        check_settings(candidate.settings, f"{place}.settings", file)
        point = candidate.point
        if point is not None and (point.ranks != point.hosts * point.ranks_per_host or point.batch < point.ranks):
            raise RecordError(
                f"{file} is damaged: {place}.point has ranks that are not hosts × ranks_per_host, or exceed its batch."
            )
    return found


def _folder_of(event: ScheduledEvent, path: Path) -> Path:
    """Return the folder of a run; raise `RecordError` if it lies outside the experiment (records may be untrusted)."""
    folder = path / event.folder
    if path.resolve() not in folder.resolve().parents:
        raise RecordError(
            f"{path / schema.EVENTS_FILE} names a run outside the experiment: {event.folder}.",
            hint="name the folder of that run directly",
        )
    return folder
