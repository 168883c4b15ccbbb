"""Read the record of a run: completed, killed, or still in progress."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline.errors import RecordError
from paceline.records import schema
from paceline.records.value_checks import LOG, check_kinds, check_run, check_run_events, check_summary

if TYPE_CHECKING:
    from paceline.records.profile import Profile
    from paceline.records.resources import Resources
    from paceline.records.timeline import Timeline

OBJECT_SECTIONS = frozenset({"config", "topology", "design", "provenance"})
"""Sections that are JSON objects."""
COMPARISON_KEYS = frozenset(
    {"workers", "device", "exchanges", "lossless", "batch", "threads", "cores", "ranks_per_host"}
)
"""Keys of the topology that a comparison requires."""
MAX_JSON_DEPTH = 50
"""Deepest nesting of JSON that is accepted: far deeper than records are, far below the recursion limit."""
MAX_VALUE = 1e18
"""Upper limit of every value of a step or sample: 10¹⁸ bytes exceed the memory of any host."""


@dataclass(frozen=True)
class Steps:
    """One rank's steps as columns, named as in `StepRow`."""

    columns: dict[str, npt.NDArray[np.float64]]
    has_loss: bool = True
    """False if a user's script does not report the loss of every step; unreported losses are NaN."""

    @classmethod
    def of(cls, rows: Sequence[schema.StepRow]) -> Steps:
        """Return rows as columns."""
        table = np.array(rows, dtype=np.float64).reshape(len(rows), len(schema.StepRow._fields))
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
    config: dict[str, Any]
    topology: dict[str, Any]
    provenance: dict[str, Any]
    steps: dict[int, Steps]
    """Steps by rank; ranks that never trained (idle ranks, servers) are missing."""
    events: list[dict[str, Any]]
    summary: dict[str, Any] | None
    """None if the run did not complete."""
    finished: bool

    @property
    def lockstep(self) -> bool:
        """Whether its ranks stepped together; otherwise ranks have different numbers of steps."""
        return bool(self.topology.get("lockstep", True))

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind, in order."""
        return [event for event in self.events if event["event"] == kind]

    @cached_property
    def timelines(self) -> dict[int, Timeline]:
        """Timelines by rank, read on first access; empty if events were not collected."""
        from paceline.records.timeline import read_timeline

        files = self._files("timeline-*.bin")
        ranks = self.topology.get("world_size") or max(files, default=0) + 1
        found = {rank: read_timeline(file, ranks) for rank, file in files.items()}
        return {rank: timeline.without_drift(self._drift_rate(rank)) for rank, timeline in found.items()}

    @cached_property
    def resources(self) -> dict[int, Resources]:
        """CPU and memory samples by rank, read on first access; empty if there are none."""
        from paceline.records.resources import read_resources

        found = {rank: read_resources(file) for rank, file in self._files("resources-*.csv").items()}
        return {rank: samples.without_drift(self._drift_rate(rank)) for rank, samples in found.items()}

    @cached_property
    def marks(self) -> dict[int, list[schema.MarkRow]]:
        """Evaluations, epoch ends and garbage collections by rank, read on first access."""
        from paceline.records.resources import read_marks

        found = {rank: read_marks(file) for rank, file in self._files("marks-*.csv").items()}
        return {rank: [mark.without_drift(self._drift_rate(rank)) for mark in marks] for rank, marks in found.items()}

    @cached_property
    def profiles(self) -> dict[int, Profile]:
        """Results of torch's profiler by rank, read on first access; empty without `--profile`."""
        from paceline.records.profile import read_profile

        return {rank: read_profile(file) for rank, file in self._files("profile-*.json").items()}

    def _files(self, pattern: str) -> dict[int, Path]:
        """Return per-rank files by rank; raise `RecordError` for a rank beyond the world size."""
        files, ranks = files_by_rank(self.path, pattern), self.topology.get("world_size")
        for rank, file in files.items():
            if ranks is not None and rank >= ranks:
                raise RecordError(f"{file} belongs to a rank that the run did not have: its world size was {ranks}.")
        return files

    def _drift_rate(self, rank: int) -> float:
        """Return the drift of a rank's clock relative to rank 0's, in seconds per second."""
        clock = (self.summary or {}).get("clock") or {}
        drift_s, measured_at_s = clock.get("drift_s", []), clock.get("measured_at_s")
        return drift_s[rank] / measured_at_s if measured_at_s and rank < len(drift_s) else 0.0


def files_by_rank(path: Path, pattern: str) -> dict[int, Path]:
    """Return the per-rank files that match a pattern such as `rank-*.csv`, by rank."""
    before, after = pattern.split("*")
    ranks = {file.name.removeprefix(before).removesuffix(after): file for file in path.glob(pattern)}
    return {int(rank): ranks[rank] for rank in sorted(ranks, key=lambda rank: (len(rank), rank)) if rank.isdecimal()}


def read_run(path: Path) -> RunRecord:
    """Read the record in a folder. Lines truncated by a kill are ignored; other damage raises `RecordError`."""
    run_file = path / schema.RUN_FILE
    if not run_file.is_file():
        raise RecordError(f"{path} contains no record: {schema.RUN_FILE} is missing.", hint="name the folder of a run")
    run = read_json(run_file)
    check_schema(run, run_file, {"config", "topology", "provenance"})
    check_run(run, run_file)
    events = read_events(path / schema.EVENTS_FILE)
    check_run_events(events, path / schema.EVENTS_FILE)
    summary_file = path / schema.SUMMARY_FILE
    summary = read_json(summary_file) if summary_file.is_file() else None
    if summary is not None:
        check_summary(summary, summary_file)
    return RunRecord(
        path=path,
        config=run["config"],
        topology=run["topology"],
        provenance=run["provenance"],
        steps={rank: read_steps(file) for rank, file in files_by_rank(path, "rank-*.csv").items()},
        events=events,
        summary=summary,
        finished=(path / schema.FINISHED_FILE).is_file(),
    )


def check_comparable(run: RunRecord) -> None:
    """Raise `RecordError` if a record lacks values that a comparison needs (a summary of one run does not)."""
    file = run.path / schema.RUN_FILE
    bn = {"bn"} if run.topology.get("batch_norm_layers") else set()
    check_kinds(run.config, {}, "its config", file, needed={"strategy"} | bn)
    check_kinds(run.topology, {}, "its topology", file, needed=COMPARISON_KEYS)
    for event in run.events_of("log"):
        check_kinds(event, {}, "an event 'log'", run.path / schema.EVENTS_FILE, needed=LOG)


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


def read_events(file: Path) -> list[dict[str, Any]]:
    """Read the events that were written so far; return an empty list if there is no file."""
    if not file.is_file():
        return []
    try:
        events = [parse_json(line) for line in whole_lines(read_text(file))]
    except ValueError as error:
        raise RecordError(f"{file} is damaged: {error}.") from None
    for event in events:
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise RecordError(f"{file} is damaged: a line does not name its event.")
    return events


def whole_lines(text: str) -> list[str]:
    """Return the lines that end with a line break; a truncated last line is ignored."""
    return text[: text.rfind("\n") + 1].splitlines()


def read_text(file: Path) -> str:
    """Read a text file; raise `RecordError` if that fails."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecordError(f"{file} is damaged: {error}.") from None
    except OSError as error:
        raise RecordError(f"{file} cannot be read: {error.strerror}.") from None


def is_measured(values: npt.NDArray[np.float64]) -> bool:
    """Return whether all values are finite and below `MAX_VALUE`."""
    return bool((np.isfinite(values) & (np.abs(values) < MAX_VALUE)).all())


def check_schema(content: dict[str, Any], file: Path, sections: set[str]) -> None:
    """Raise `RecordError` if another schema version wrote the file, or if a section is missing."""
    if content.get("schema") != schema.SCHEMA_VERSION:
        raise RecordError(
            f"{file} has record schema {content.get('schema')}; this version of Paceline reads only schema "
            f"{schema.SCHEMA_VERSION}.",
            hint="repeat the run with this version, or read the record with the version that wrote it",
        )
    missing = sections - content.keys()
    if missing:
        raise RecordError(f"{file} is damaged: it has no {', '.join(sorted(missing))}.")
    for name in sorted(sections & OBJECT_SECTIONS):
        if not isinstance(content[name], dict):
            raise RecordError(f"{file} is damaged: its {name} is not a JSON object.")


def read_json(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file; raise `RecordError` if that fails."""
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{file} cannot be read: {error}.") from None
    if not isinstance(content, dict):
        raise RecordError(f"{file} is damaged: it is not a JSON object.")
    return content


def parse_json(text: str) -> Any:
    """Decode JSON; raise `ValueError` for NaN, infinite numbers, deep nesting and invalid surrogates."""
    try:
        content = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_finite_int)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_depth(content)
    if "\\u" in text:  # A lone surrogate can be escaped in JSON, but not encoded for output.
        json.dumps(content, ensure_ascii=False).encode()
    return content


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large")
    return value


def _finite_int(text: str) -> int:
    _finite(text)
    return int(text)


def _check_depth(content: Any) -> None:
    level = [content]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, list | dict)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ValueError("it is nested too deeply")
