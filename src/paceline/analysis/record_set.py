"""Set of records for one comparison: one experiment, several, or runs that were started separately."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from paceline.config import DEFAULT_STRATEGY, RunConfig
from paceline.config.recipe import RECIPE_SETTINGS
from paceline.config.setting import select
from paceline.records import RunRecord
from paceline.records.events import CandidateEvent, ContinuedEvent, ExperimentEvent
from paceline.records.examination import Examination
from paceline.records.experiment.design import Candidate, CandidateRole, Design
from paceline.records.experiment.record import ExperimentRecord
from paceline.records.provenance import Provenance
from paceline.records.settings import Settings

NOT_COMPARED = frozenset(select(RunConfig, lambda metadata: not metadata.compared))
"""Config keys in which two runs of one candidate may differ."""


@dataclass(frozen=True)
class RecordedRun:
    """A run in a record set."""

    candidate: str
    repeat: tuple[int, int]
    """Number of its record and of the repeat. Runs of one repeat have the same seed; losses and accuracies are paired
    by this key."""
    timing_key: tuple[int, int]
    """Key that pairs times. In an experiment it is equal for the runs of a repeat, which are interleaved, unless the
    experiment was interrupted between them. It is unique for a run that was started separately."""
    run: RunRecord


@dataclass(frozen=True)
class RecordSet:
    """Runs to compare, with the other contents of their records."""

    candidates: list[Candidate]
    runs: list[RecordedRun]
    reference: str | None
    """Candidate that ratios should be relative to; it may not have been measured."""
    events: list[ExperimentEvent] = field(default_factory=list)
    """Events of the experiments, such as parity proofs and failures, with candidate names as in this set."""
    designs: list[Design] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    """Folders of the records."""
    provenances: list[Provenance] = field(default_factory=list)
    config: Settings = field(default_factory=dict)
    """Settings that all runs share."""
    examination: Examination | None = None
    """First examination in the records; None if there is none."""
    read_warnings: list[str] = field(default_factory=list)
    """Sentences on damaged parts that were skipped."""

    @property
    def compares_times(self) -> bool:
        """Whether times are compared, as in all experiments but those on accuracy alone."""
        return all(design.compares_times for design in self.designs)

    def recorded_runs_of(self, candidate: str) -> list[RecordedRun]:
        """Return a candidate's runs, with the keys that pair them."""
        return [recorded for recorded in self.runs if recorded.candidate == candidate]

    def runs_of(self, candidate: str) -> dict[tuple[int, int], RunRecord]:
        """Return a candidate's runs by repeat."""
        return {recorded.repeat: recorded.run for recorded in self.recorded_runs_of(candidate)}


@dataclass(frozen=True)
class _SourceCandidate:
    """A candidate of one source, before its name is made unique in the record set."""

    candidate: Candidate
    ranks: int | None
    host: str | None
    runs: list[tuple[int, int, RunRecord]]
    """Repeat, timing number and run."""


@dataclass(frozen=True)
class _RecordSource:
    """An experiment, or all runs that were started separately."""

    members: list[_SourceCandidate]
    reference: Candidate | None
    events: list[ExperimentEvent]
    designs: list[Design]
    folders: list[str]
    provenances: list[Provenance]
    config: Settings
    run_config: Settings
    """Settings that all runs share, with the values of their recipe, which `config` of an experiment does not have."""
    examination: Examination | None = None
    read_warnings: list[str] = field(default_factory=list)


def collect_records(records: Sequence[ExperimentRecord | RunRecord], read_warnings: Sequence[str] = ()) -> RecordSet:
    """Combine records into one set; candidates of the same name in different records get distinct names.

    `read_warnings` has a sentence on each record that was left out, because it is damaged.
    """
    sources = _sources(records)
    candidates, runs, events = list[Candidate](), list[RecordedRun](), list[ExperimentEvent]()
    reference = None
    for index, (source, names) in enumerate(zip(sources, _names(sources), strict=True)):
        by_old_name = {m.candidate.name: name for m, name in zip(source.members, names, strict=True)}
        for member, name in zip(source.members, names, strict=True):
            candidates.append(msgspec.structs.replace(member.candidate, name=name))
            runs += [RecordedRun(name, (index, repeat), (index, timing), run) for repeat, timing, run in member.runs]
            if index == 0 and member.candidate is source.reference:
                reference = name
        for event in source.events:
            if isinstance(event, CandidateEvent):
                event = msgspec.structs.replace(event, candidate=by_old_name[event.candidate])
            events.append(event)
    return RecordSet(
        candidates=candidates,
        runs=runs,
        reference=reference,
        events=events,
        designs=[design for source in sources for design in source.designs],
        sources=[folder for source in sources for folder in source.folders],
        provenances=[provenance for source in sources for provenance in source.provenances],
        config=_shared([source.config for source in sources]),
        examination=next((source.examination for source in sources if source.examination is not None), None),
        read_warnings=[*read_warnings, *[warning for source in sources for warning in source.read_warnings]],
    )


def _sources(records: Sequence[ExperimentRecord | RunRecord]) -> list[_RecordSource]:
    """Return one source per experiment, and one for all runs that were started separately."""
    experiments = [_of_experiment(record) for record in records if isinstance(record, ExperimentRecord)]
    alone = [record for record in records if isinstance(record, RunRecord)]
    return experiments + ([_of_runs(alone)] if alone else [])


def _of_experiment(record: ExperimentRecord) -> _RecordSource:
    members = []
    together = {key: number for number, key in enumerate(sorted({(m.repeat, m.part) for m in record.runs}))}
    for candidate in record.candidates:
        runs = [(m.repeat, together[m.repeat, m.part], m.run) for m in record.runs if m.candidate is candidate]
        planned = 1 if candidate.role == "baseline" else record.design.ranks
        ranks = _ranks(runs[0][2]) if runs else planned
        members.append(_SourceCandidate(candidate, ranks, record.provenance.host, runs))
    return _RecordSource(
        members=members,
        reference=next((c for c in record.candidates if c.name == record.design.reference), None),
        events=record.events,
        designs=[record.design],
        folders=[str(record.path)],
        provenances=[record.provenance, *[event.provenance for event in record.events_of(ContinuedEvent)]],
        config=record.config,
        run_config=_with_recipe_of_runs(record.config, [entry.run for entry in record.runs]),
        examination=record.examination,
        read_warnings=record.read_warnings,
    )


def _of_runs(runs: list[RunRecord]) -> _RecordSource:
    """Group runs: those with equal strategy, settings, number of ranks and host are repeats of one candidate."""
    shared = _shared([run.config for run in runs])
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        settings = {key: value for key, value in run.config.items() if key not in NOT_COMPARED}
        identity = [run.config["strategy"], _ranks(run), run.provenance.host, settings]
        groups.setdefault(json.dumps(identity, sort_keys=True, default=str), []).append(run)
    seeded = [_by_seed(members) for members in groups.values()]
    repeats = {key: number for number, key in enumerate(sorted({key for group in seeded for key in group}))}
    timing_numbers = {id(run): number for number, run in enumerate(runs)}
    members = []
    for group in seeded:
        first = next(iter(group.values()))
        settings = {k: v for k, v in first.config.items() if k not in shared and k not in NOT_COMPARED}
        name = " ".join([first.config["strategy"], *[f"{k}={v}" for k, v in settings.items()]])
        candidate = Candidate(name, first.config["strategy"], settings, _role(first), first.topology.lossless)
        numbered = [(repeats[key], timing_numbers[id(run)], run) for key, run in group.items()]
        members.append(_SourceCandidate(candidate, _ranks(first), first.provenance.host, numbered))
    return _RecordSource(
        members=members,
        reference=reference_of([member.candidate for member in members]),
        events=[],
        designs=[],
        folders=[str(run.path) for run in runs],
        provenances=[run.provenance for run in runs],
        config=shared,
        run_config=shared,
        read_warnings=[warning for run in runs for warning in run.read_warnings],
    )


def _with_recipe_of_runs(config: Settings, runs: Sequence[RunRecord]) -> Settings:
    """Return the config of an experiment with the settings of the recipe that its runs trained by.

    Settings of the recipe that differ between runs are left out: the names of the candidates tell them apart.
    """
    if not runs:
        return config
    others = {key: value for key, value in config.items() if key not in RECIPE_SETTINGS}
    shared = _shared([run.config for run in runs])
    return others | {key: value for key, value in shared.items() if key in RECIPE_SETTINGS}


def reference_of(candidates: Sequence[Candidate]) -> Candidate:
    """Return the reference of ratios: the default strategy, else the first of role candidate, else the first."""
    eligible = [candidate for candidate in candidates if candidate.role == "candidate"]
    named = [candidate for candidate in eligible if candidate.strategy == DEFAULT_STRATEGY]
    return (named or eligible or list(candidates))[0]


def _role(run: RunRecord) -> CandidateRole:
    if not run.topology.exchanges:
        return "bound"
    return "baseline" if _trains_alone(run) else "candidate"


def _trains_alone(run: RunRecord) -> bool:
    return run.topology.workers == 1 and not run.topology.servers


def _ranks(run: RunRecord) -> int:
    """Return the world size; 1 for a baseline, which trains in one process however many were started."""
    return 1 if _trains_alone(run) else run.topology.world_size


def _by_seed(runs: Sequence[RunRecord]) -> dict[tuple[int, int], RunRecord]:
    """Return a candidate's runs by seed and number of the run with that seed."""
    seen = Counter[int]()
    found = {}
    for run in sorted(runs, key=lambda run: str(run.path)):
        seed = int(run.config.get("seed") or 0)
        found[seed, seen[seed]] = run
        seen[seed] += 1
    return found


def _names(sources: Sequence[_RecordSource]) -> list[list[str]]:
    """Return unique names by source: settings, ranks and host are appended where they distinguish candidates."""
    shared = _shared([source.run_config for source in sources])
    hosts = {member.host for source in sources for member in source.members}
    rank_counts = defaultdict[str, set[int | None]](set)
    named = list[tuple[_SourceCandidate, str]]()
    for source in sources:
        settings = [f"{k}={v}" for k, v in source.run_config.items() if k not in shared and k not in NOT_COMPARED]
        named += [(member, " ".join([member.candidate.name, *settings])) for member in source.members]
    for member, name in named:
        rank_counts[name].add(member.ranks)
    taken = set[str]()
    names = []
    for member, name in named:
        ranks = [f"ranks={member.ranks}"] if len(rank_counts[name]) > 1 else []
        host = [f"@{member.host}"] if len(hosts) > 1 and member.host else []
        names.append(_unused(" ".join([name, *ranks, *host]), taken))
    in_order = iter(names)
    return [[next(in_order) for _ in source.members] for source in sources]


def _unused(name: str, taken: set[str]) -> str:
    """Return the name, with a number appended if it is taken, and add it to `taken`."""
    number, unused = 1, name
    while unused in taken:
        number += 1
        unused = f"{name} ({number})"
    taken.add(unused)
    return unused


def _shared(configs: Sequence[Settings]) -> Settings:
    """Return the settings that all configurations have in common."""
    first, *others = configs
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
