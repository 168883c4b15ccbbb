"""Reads records: whole ones, those of a run that was killed, and those of a run that is still going on."""

from __future__ import annotations

import json
import math
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

OBJECTS = frozenset({"config", "topology", "design", "provenance"})
"""Sections that hold values by name."""
COMPARED = frozenset({"workers", "device", "exchanges", "lossless", "batch", "threads", "cores", "ranks_per_host"})
"""What a comparison relies on in a topology."""
DEEPEST = 50
"""How deeply JSON may be nested: far more than ours is, far less than what reads it can bear."""
MOST = 1e18
"""No figure of a step or a sample is as large: 10¹⁸ bytes are more than any host has."""


@dataclass(frozen=True)
class Steps:
    """One rank's steps as columns, named as in `StepRow`."""

    columns: dict[str, npt.NDArray[np.float64]]
    tells_loss: bool = True
    """False for a script of the user's own that does not tell the loss of every step; it is not a number there."""

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, column: str) -> npt.NDArray[np.float64]:
        return self.columns[column]

    @property
    def total_s(self) -> npt.NDArray[np.float64]:
        """The duration of each step."""
        c = self.columns
        return c["data_s"] + c["forward_s"] + c["backward_s"] + c["update_s"]


@dataclass(frozen=True)
class RunRecord:
    """A run as it stands on disk."""

    path: Path
    config: dict[str, Any]
    topology: dict[str, Any]
    provenance: dict[str, Any]
    steps: dict[int, Steps]
    """By rank; ranks that never trained (idle ones, servers) are missing."""
    events: list[dict[str, Any]]
    summary: dict[str, Any] | None
    """None when the run did not come to its end."""
    finished: bool

    @property
    def lockstep(self) -> bool:
        """Whether its ranks stepped together: else each has as many steps as it came to."""
        return bool(self.topology.get("lockstep", True))

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind, in order."""
        return [event for event in self.events if event["event"] == kind]

    @cached_property
    def timelines(self) -> dict[int, Timeline]:
        """When each rank did what; only read when asked for. Empty where events were not collected."""
        from paceline.records.timeline import read_timeline

        files = self._files("timeline-*.bin")
        ranks = self.topology.get("world_size") or max(files, default=0) + 1
        found = {rank: read_timeline(file, ranks) for rank, file in files.items()}
        return {rank: timeline.without_drift(self._drift_rate(rank)) for rank, timeline in found.items()}

    @cached_property
    def resources(self) -> dict[int, Resources]:
        """What each rank's process used; only read when asked for. Empty in records that have none."""
        from paceline.records.resources import read_resources

        found = {rank: read_resources(file) for rank, file in self._files("resources-*.csv").items()}
        return {rank: samples.without_drift(self._drift_rate(rank)) for rank, samples in found.items()}

    @cached_property
    def marks(self) -> dict[int, list[schema.MarkRow]]:
        """What happened on each rank beside its steps; only read when asked for."""
        from paceline.records.resources import read_marks

        found = {rank: read_marks(file) for rank, file in self._files("marks-*.csv").items()}
        return {rank: [mark.without_drift(self._drift_rate(rank)) for mark in marks] for rank, marks in found.items()}

    @cached_property
    def profiles(self) -> dict[int, Profile]:
        """What torch's profiler found on each rank; only read when asked for. Empty without `--profile`."""
        from paceline.records.profile import read_profile

        return {rank: read_profile(file) for rank, file in self._files("profile-*.json").items()}

    def _files(self, pattern: str) -> dict[int, Path]:
        """The files that there is one of for every rank; one of a rank that there cannot be is an error."""
        files, ranks = files_by_rank(self.path, pattern), self.topology.get("world_size")
        for rank, file in files.items():
            if ranks is not None and rank >= ranks:
                raise RecordError(f"{file} is of a rank that the run did not have: it had {ranks}.")
        return files

    def _drift_rate(self, rank: int) -> float:
        """By how much a rank's clock went faster than rank 0's, in seconds a second."""
        clock = (self.summary or {}).get("clock") or {}
        drift_s, at_s = clock.get("drift_s", []), clock.get("at_s")
        return drift_s[rank] / at_s if at_s and rank < len(drift_s) else 0.0


def files_by_rank(path: Path, pattern: str) -> dict[int, Path]:
    """The files of a record that there is one of for every rank, as `rank-*.csv`."""
    before, after = pattern.split("*")
    ranks = {file.name.removeprefix(before).removesuffix(after): file for file in path.glob(pattern)}
    return {int(rank): ranks[rank] for rank in sorted(ranks, key=lambda rank: (len(rank), rank)) if rank.isdecimal()}


def read_run(path: Path) -> RunRecord:
    """Reads the record in a folder; what a kill cut short is passed over, what is damaged otherwise is an error."""
    run_file = path / schema.RUN_FILE
    if not run_file.is_file():
        raise RecordError(f"{path} holds no record: {schema.RUN_FILE} is missing.", hint="name a run's own folder")
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
    """Refuses a record that lacks what a comparison needs; what only tells of one run may lack it."""
    file = run.path / schema.RUN_FILE
    bn = {"bn"} if run.topology.get("batch_norm_layers") else set()
    check_kinds(run.config, {}, "its config", file, needed={"strategy"} | bn)
    check_kinds(run.topology, {}, "its topology", file, needed=COMPARED)
    for event in run.events_of("log"):
        check_kinds(event, {}, "an event 'log'", run.path / schema.EVENTS_FILE, needed=LOG)


def read_steps(file: Path) -> Steps:
    """One rank's steps."""
    header, *lines = whole_lines(read_text(file)) or [schema.CSV_HEADER.strip()]
    names = header.split(",")
    if not set(schema.StepRow._fields) <= set(names):
        raise RecordError(f"{file} is damaged: its first line does not name its columns.")
    loss = names.index("loss")
    try:
        rows = [
            [float("nan" if index == loss and not value else value) for index, value in enumerate(line.split(","))]
            for line in lines
        ]
        table = np.array(rows, dtype=np.float64).reshape(len(lines), len(names))
    except ValueError:
        raise RecordError(f"{file} is damaged: a line does not hold {len(names)} numbers.") from None
    columns = {name: table[:, index] for index, name in enumerate(names)}
    if not all(is_measured(columns[name]) for name in schema.StepRow._fields if name != "loss"):
        raise RecordError(f"{file} is damaged: a step has something that was not measured.")
    return Steps(columns, tells_loss=not any(",," in line for line in lines))


def read_events(file: Path) -> list[dict[str, Any]]:
    """The run's events so far."""
    if not file.is_file():
        return []
    try:
        events = [parse_json(line) for line in whole_lines(read_text(file))]
    except ValueError as error:
        raise RecordError(f"{file} is damaged: {error}.") from None
    for event in events:
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise RecordError(f"{file} is damaged: a line does not say which event it is.")
    return events


def whole_lines(text: str) -> list[str]:
    """The lines that were written to their end."""
    return text[: text.rfind("\n") + 1].splitlines()


def read_text(file: Path) -> str:
    """All of a file of text."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecordError(f"{file} is damaged: {error}.") from None
    except OSError as error:
        raise RecordError(f"{file} cannot be read: {error.strerror}.") from None


def is_measured(values: npt.NDArray[np.float64]) -> bool:
    """Whether all values are numbers, and none beyond what anything in a record can be."""
    return bool((np.isfinite(values) & (np.abs(values) < MOST)).all())


def check_schema(content: dict[str, Any], file: Path, sections: set[str]) -> None:
    """Refuses what another version wrote, or what lacks a section."""
    if content.get("schema") != schema.SCHEMA_VERSION:
        raise RecordError(
            f"{file} has schema {content.get('schema')}, but this version of Paceline reads {schema.SCHEMA_VERSION}.",
            hint="read it with the version that wrote it, which it names",
        )
    missing = sections - content.keys()
    if missing:
        raise RecordError(f"{file} is damaged: it has no {', '.join(sorted(missing))}.")
    for name in sorted(sections & OBJECTS):
        if not isinstance(content[name], dict):
            raise RecordError(f"{file} is damaged: its {name} is not a JSON object.")


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{file} cannot be read: {error}.") from None
    if not isinstance(content, dict):
        raise RecordError(f"{file} is damaged: it is not a JSON object.")
    return content


def parse_json(text: str) -> Any:
    """What a text of JSON holds; raises `ValueError` for what ours never has: NaN, and all that readers choke on."""
    try:
        content = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_finite_int)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_depth(content)
    if "\\u" in text:  # Half of a pair of surrogates can be escaped, but not printed.
        json.dumps(content, ensure_ascii=False).encode()
    return content


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


def _finite_int(text: str) -> int:
    _finite(text)
    return int(text)


def _check_depth(content: Any) -> None:
    level = [content]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, list | dict)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ValueError("it is nested too deeply")
