"""Read the record of a run: completed, killed, or still in progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.errors import RecordError
from paceline.records import schema
from paceline.records.decoder import exists, read_bytes, read_model
from paceline.records.description import RunDescription, Topology
from paceline.records.events import RUN_EVENTS, EventT, ResumedEvent, RunEvent, events_of, read_events
from paceline.records.provenance import Provenance
from paceline.records.resumed import counting_events
from paceline.records.settings import Settings, check_settings
from paceline.records.summary import Summary, check_summary

if TYPE_CHECKING:
    from paceline.records.profile import Profile
    from paceline.records.resources import Resources
    from paceline.records.timeline import Timeline

MAX_VALUE = 1e18
"""Upper limit of every value of a step or sample: 10¹⁸ bytes exceed the memory of any host."""
TIMELINES, RESOURCES, MARKS, PROFILES = "timeline-*.bin", "resources-*.csv", "marks-*.csv", "profile-*.json"
"""Files of ranks that a report can do without."""


@dataclass(frozen=True)
class Steps:
    """One rank's steps as columns, named as in `StepRow`."""

    columns: dict[str, npt.NDArray[np.float64]]
    has_loss: bool = True
    """False if a user's script does not report the loss of every step; unreported losses are NaN."""

    @classmethod
    def of(cls, rows: Sequence[schema.StepRow]) -> Steps:
        """Return rows as columns, with times rounded as in the file."""
        table = np.array(rows, dtype=np.float64).reshape(len(rows), len(schema.StepRow._fields))
        times = slice(schema.StepRow._fields.index("start_s"), schema.StepRow._fields.index("update_s") + 1)
        table[:, times] = table[:, times].round(schema.STEP_DECIMALS)
        columns = {name: table[:, index] for index, name in enumerate(schema.StepRow._fields)}
        return cls(columns, has_loss=all(row.loss is not None for row in rows))

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, column: str) -> npt.NDArray[np.float64]:
        return self.columns[column]

    @property
    def total_s(self) -> npt.NDArray[np.float64]:
        """Duration of each step."""
        c = self.columns
        return c["data_s"] + c["forward_s"] + c["backward_s"] + c["update_s"]


@dataclass(frozen=True)
class RunRecord:
    """A run read from disk."""

    path: Path
    config: Settings
    topology: Topology
    provenance: Provenance
    steps: dict[int, Steps]
    """Steps by rank; ranks that never trained (idle ranks, servers) are missing. If the run resumed, those of its last
    attempt."""
    events: list[RunEvent]
    """Events of the whole run; of steps that were trained again, only those of the last time."""
    summary: Summary | None
    """None if the run did not complete."""
    finished: bool
    omitted: frozenset[str] = frozenset()
    """Names of files that are damaged, as patterns such as `timeline-*.bin`; they count as not written."""
    read_warnings: list[str] = field(default_factory=list)
    """Sentences on these files."""

    @property
    def lockstep(self) -> bool:
        """Whether its ranks stepped together; otherwise ranks have different numbers of steps."""
        return self.topology.lockstep

    def events_of(self, kind: type[EventT]) -> list[EventT]:
        """Return the events of one type, in order."""
        return events_of(self.events, kind)

    @property
    def first_step(self) -> int:
        """Number of the first step in the files of ranks: that of the last resume, or 0."""
        resumed = self.events_of(ResumedEvent)
        return resumed[-1].step if resumed else 0

    @cached_property
    def timelines(self) -> dict[int, Timeline]:
        """Timelines by rank, read on first access; empty if events were not collected."""
        from paceline.records.timeline import read_timeline

        files = self._files(TIMELINES)
        found = {rank: read_timeline(file, self.topology.world_size) for rank, file in files.items()}
        return {rank: timeline.without_drift(self._drift_rate(rank)) for rank, timeline in found.items()}

    @cached_property
    def resources(self) -> dict[int, Resources]:
        """CPU and memory samples by rank, read on first access; empty if there are none."""
        from paceline.records.resources import read_resources

        found = {rank: read_resources(file) for rank, file in self._files(RESOURCES).items()}
        return {rank: samples.without_drift(self._drift_rate(rank)) for rank, samples in found.items()}

    @cached_property
    def marks(self) -> dict[int, list[schema.MarkRow]]:
        """Evaluations, epoch ends and garbage collections by rank, read on first access."""
        from paceline.records.resources import read_marks

        found = {rank: read_marks(file) for rank, file in self._files(MARKS).items()}
        return {rank: [mark.without_drift(self._drift_rate(rank)) for mark in marks] for rank, marks in found.items()}

    @cached_property
    def profiles(self) -> dict[int, Profile]:
        """Results of torch's profiler by rank, read on first access; empty without `--profile`."""
        from paceline.records.profile import read_profile

        return {rank: read_profile(file) for rank, file in self._files(PROFILES).items()}

    def _files(self, pattern: str) -> dict[int, Path]:
        """Return per-rank files by rank; raise `RecordError` for a rank beyond the world size."""
        files = {} if pattern in self.omitted else files_by_rank(self.path, pattern)
        ranks = self.topology.world_size
        for rank, file in files.items():
            if rank >= ranks:
                raise RecordError(f"{file} belongs to a rank that the run did not have: its world size was {ranks}.")
        return files

    def _drift_rate(self, rank: int) -> float:
        """Return the drift of a rank's clock relative to rank 0's, in seconds per second."""
        clock = self.summary.clock if self.summary else None
        if clock is None or not clock.measured_at_s or rank >= len(clock.drift_s):
            return 0.0
        return clock.drift_s[rank] / clock.measured_at_s


def files_by_rank(path: Path, pattern: str) -> dict[int, Path]:
    """Return the per-rank files that match a pattern such as `rank-*.csv`, by rank."""
    before, after = pattern.split("*")
    ranks = {file.name.removeprefix(before).removesuffix(after): file for file in path.glob(pattern)}
    return {int(rank): ranks[rank] for rank in sorted(ranks, key=lambda rank: (len(rank), rank)) if rank.isdecimal()}


def read_run(path: Path) -> RunRecord:
    """Read the record in a folder. Lines truncated by a kill are ignored; other damage raises `RecordError`."""
    run_file = path / schema.RUN_FILE
    if not exists(run_file):
        raise RecordError(f"{path} contains no record: {schema.RUN_FILE} is missing.", hint="name the folder of a run")
    run = read_model(run_file, RunDescription, "run")
    check_settings(run.config, "run.config", run_file, needed=("strategy", "bn"))
    return RunRecord(
        path=path,
        config=run.config,
        topology=run.topology,
        provenance=run.provenance,
        steps={rank: read_steps(file) for rank, file in files_by_rank(path, "rank-*.csv").items()},
        events=counting_events(read_events(path / schema.EVENTS_FILE, RUN_EVENTS)),
        summary=_read_summary(path / schema.SUMMARY_FILE),
        finished=exists(path / schema.FINISHED_FILE),
    )


def read_usable_run(path: Path) -> RunRecord:
    """Read the record in a folder, without optional files that are damaged; `read_warnings` says which these are.

    Damage to any other file raises `RecordError`.
    """
    run = read_run(path)
    contents = {
        TIMELINES: ("timelines", "the communication of this run"),
        RESOURCES: ("resources", "the CPU and memory use of this run"),
        MARKS: ("marks", "the evaluations of this run in the timeline"),
        PROFILES: ("profiles", "the profile of this run"),
    }
    omitted, warnings = set[str](), list[str]()
    for pattern, (name, content) in contents.items():
        try:
            getattr(run, name)
        except RecordError as error:
            omitted.add(pattern)
            warnings.append(f"{error.message} The report omits {content}.")
    return replace(run, omitted=frozenset(omitted), read_warnings=warnings) if omitted else run


def is_complete(path: Path) -> bool:
    """Return whether a folder contains a run that has finished or stopped by divergence, with the files of all ranks.

    A host that does not share the leader's disk sends the files of its ranks after rank 0 has marked the run finished.
    """
    try:
        run = read_run(path)
    except RecordError:  # For example a file that was not written completely when the machine stopped.
        return False
    if run.summary is None or not (run.finished or _is_stopped_by_divergence(run.summary)):
        return False
    steps = {rank.rank: rank.steps for rank in run.summary.ranks}
    written = [set(files_by_rank(path, pattern)) for pattern in (TIMELINES, RESOURCES, MARKS)]
    return all(len(run.steps.get(rank, ())) == number for rank, number in steps.items()) and all(
        not ranks or steps.keys() <= ranks for ranks in written
    )


def _is_stopped_by_divergence(summary: Summary) -> bool:
    """Return whether a loss or gradients that are not finite stopped a run; one whose loss has grown goes on."""
    return summary.divergence is not None and summary.divergence.loss is None


def _read_summary(file: Path) -> Summary | None:
    """Read the summary; return None if the run has not written it."""
    if not exists(file):
        return None
    summary = read_model(file, Summary, "summary")
    try:
        check_summary(summary)
    except ValueError as error:
        raise RecordError(f"{file} is damaged: {error}.") from None
    return summary


def read_steps(file: Path) -> Steps:
    """Read one rank's steps."""
    header, *lines = whole_lines(read_text(file)) or [schema.CSV_HEADER.strip()]
    names = header.split(",")
    if not set(schema.StepRow._fields) <= set(names):
        raise RecordError(f"{file} is damaged: the header line lacks columns.")
    loss = names.index("loss")
    try:
        rows = [
            [float("nan" if index == loss and not value else value) for index, value in enumerate(line.split(","))]
            for line in lines
        ]
        table = np.array(rows, dtype=np.float64).reshape(len(lines), len(names))
    except ValueError:
        raise RecordError(f"{file} is damaged: a line does not contain {len(names)} numbers.") from None
    columns = {name: table[:, index] for index, name in enumerate(names)}
    if not all(is_measured(columns[name]) for name in schema.StepRow._fields if name != "loss"):
        raise RecordError(f"{file} is damaged: a step has a value that is missing or out of range.")
    return Steps(columns, has_loss=not any(",," in line for line in lines))


def whole_lines(text: str) -> list[str]:
    """Return the lines that end with a line break; a truncated last line is ignored."""
    return text[: text.rfind("\n") + 1].splitlines()


def read_text(file: Path) -> str:
    """Read a text file; raise `RecordError` if that fails."""
    try:
        return read_bytes(file).decode()
    except UnicodeDecodeError as error:
        raise RecordError(f"{file} is damaged: {error}.") from None


def is_measured(values: npt.NDArray[np.float64]) -> bool:
    """Return whether all values are finite and below `MAX_VALUE`."""
    return bool((np.isfinite(values) & (np.abs(values) < MAX_VALUE)).all())
