"""Leaderboard of races: ranked by score, within the same task on the same hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from paceline.analysis.other_load import OtherLoad, other_load
from paceline.analysis.race.race import Race, race
from paceline.analysis.record_set import NOT_COMPARED, collect_records
from paceline.config import RunConfig
from paceline.errors import RecordError
from paceline.formatting import format_cores
from paceline.records.experiment.record import ExperimentRecord
from paceline.records.find import find_experiments
from paceline.records.provenance import Provenance
from paceline.records.schema import RACE_KIND
from paceline.records.settings import Settings


@dataclass(frozen=True, order=True)
class RaceTask:
    """Task of a race: races of different tasks cannot be compared."""

    workload: str
    data: str
    """Data set with its options; empty for a user's workload without `--data`, which brings its own."""
    target: float
    tta: str


@dataclass(frozen=True, order=True)
class RaceHardware:
    """Hardware of a race: times on different hardware cannot be compared."""

    device: str
    """`cpu`, or the name of the GPU."""
    cpu: str
    """Model of the processor; empty if it is unknown."""
    cores: int
    """Cores of the machine; 0 if they are unknown."""
    ranks: int
    hosts: int
    emulated: str
    """Value of `--emulate`, and the cores of each host; empty on real hosts."""


@dataclass(frozen=True)
class LeaderboardEntry:
    """One race on the leaderboard."""

    path: Path
    race: Race
    provenance: Provenance
    strategy: str
    batch: int | None
    """Global batch; None if the workload's data sets it."""
    settings: Settings
    """All settings of its first run, with the values of its recipe."""
    load: OtherLoad | None
    """Load of other programs during its runs; None if it was not measured."""
    place: int | None = None
    """Place in its group, from 1; None for a race without a score, or one that is not complete."""
    differing: Settings | None = None
    """Settings in which it differs from another race of its group; None before it is in a group."""
    software: dict[str, str] = field(default_factory=dict)
    """Versions, by name, in which it differs from another race of its group."""

    @property
    def is_ranked(self) -> bool:
        """Whether it can have a place: a race that was cut off could have been stopped after a lucky run."""
        return self.race.score_s is not None and self.race.is_complete


@dataclass(frozen=True)
class LeaderboardGroup:
    """Races of one task on the same hardware, the best first."""

    task: RaceTask
    hardware: RaceHardware
    entries: list[LeaderboardEntry]


@dataclass(frozen=True)
class Leaderboard:
    """Races in a folder, in groups that can be compared."""

    groups: list[LeaderboardGroup]
    warnings: list[str]
    """Sentences on records that cannot be read, and on races without a run."""

    @property
    def entries(self) -> list[LeaderboardEntry]:
        """All races."""
        return [entry for group in self.groups for entry in group.entries]


def read_leaderboard(folder: Path) -> Leaderboard:
    """Return the leaderboard of all races in a folder and its subfolders; raise if there is none."""
    records, warnings = find_experiments(folder, RACE_KIND)
    if not records and not warnings:
        raise RecordError(f"{folder} contains no race.", hint="`paceline race --out FOLDER` writes one")
    return leaderboard(records, warnings)


def leaderboard(records: Sequence[ExperimentRecord], warnings: Sequence[str] = ()) -> Leaderboard:
    """Return the leaderboard of some races."""
    groups: dict[tuple[RaceTask, RaceHardware], list[LeaderboardEntry]] = {}
    notes = list(warnings)
    for record in records:
        notes += record.read_warnings
        if not record.runs:
            notes.append(f"{record.path} has no run yet.")
            continue
        entry = _entry(record)
        groups.setdefault((_task(entry), _hardware(record)), []).append(entry)
    return Leaderboard([LeaderboardGroup(*key, _ranked(groups[key])) for key in sorted(groups)], notes)


def _entry(record: ExperimentRecord) -> LeaderboardEntry:
    first, record_set = record.runs[0].run, collect_records([record])
    return LeaderboardEntry(
        path=record.path,
        race=race(record_set),
        load=other_load(record_set),
        provenance=record.provenance,
        strategy=first.topology.strategy,
        batch=first.topology.batch,
        settings=first.config | {"batch": first.topology.batch, "batch_per_rank": None},
    )


def _task(entry: LeaderboardEntry) -> RaceTask:
    workload, design = str(entry.settings["workload"]), entry.race.design
    data = str(entry.settings["data"])
    is_unset = ":" in workload and data == RunConfig().data
    return RaceTask(workload, "" if is_unset else data, design.target_accuracy, design.tta)


def _hardware(record: ExperimentRecord) -> RaceHardware:
    topology, design = record.runs[0].run.topology, record.design
    share = "" if design.host_cpus is None else f", {format_cores(design.host_cpus)} each"
    return RaceHardware(
        device=topology.device,
        cpu=record.provenance.cpu or "",
        cores=record.provenance.cpu_count or 0,
        ranks=design.ranks,
        hosts=design.hosts,
        emulated=f"{design.emulated}{share}" if design.emulated else "",
    )


def _ranked(entries: Sequence[LeaderboardEntry]) -> list[LeaderboardEntry]:
    """Return the races of a group in order, with their places and what distinguishes them; those without come last."""
    ranked = sorted((one for one in entries if one.is_ranked), key=lambda one: one.race.score_s or 0.0)
    others = sorted((one for one in entries if not one.is_ranked), key=lambda one: str(one.path))
    known = [own.name for own in fields(RunConfig) if own.name not in NOT_COMPARED]
    differing = [name for name in known if len({repr(one.settings.get(name)) for one in entries}) > 1]
    versions = [_versions(one.provenance) for one in entries]
    several = {name for one in versions for name in one if len({other.get(name) for other in versions}) > 1}
    return [
        replace(
            one,
            place=ranked.index(one) + 1 if one.is_ranked else None,
            differing={name: one.settings.get(name) for name in differing},
            software={name: version for name, version in _versions(one.provenance).items() if name in several},
        )
        for one in [*ranked, *others]
    ]


def _versions(provenance: Provenance) -> dict[str, str]:
    """Return the versions of Python and of packages; that of Paceline with the digest of its sources."""
    found = {"Python": provenance.python} | {name: own or "unknown" for name, own in provenance.versions.items()}
    if provenance.sources and "paceline" in found:
        found["paceline"] += f" (sources {provenance.sources})"
    return found
