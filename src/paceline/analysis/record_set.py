"""Brings records together for one comparison: an experiment, several, or runs that were made one by one."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.records import RunRecord
from paceline.records.examination import Examination
from paceline.records.experiment import Candidate, CandidateRole, ExperimentRecord
from paceline.records.reader import check_comparable

NOT_A_SETTING = frozenset({"seed", "strategy", "data_dir", "trace", "log_every", "tensorboard", "profile", "timeout"})
"""What two runs of one candidate may differ in."""


@dataclass(frozen=True)
class RecordedRun:
    """A run in the pool."""

    candidate: str
    repeat: tuple[int, int]
    """Which record it came with, and which repeat of it. Runs of one repeat have the same seed, so losses and
    accuracies are paired by this."""
    moment: tuple[int, int]
    """The same for runs that were measured together, so times are paired by this: the repeat in an experiment, but a
    moment of its own for a run that was made alone."""
    run: RunRecord


@dataclass(frozen=True)
class RecordSet:
    """Runs to compare, and what else their records say."""

    candidates: list[Candidate]
    entries: list[RecordedRun]
    reference: str | None
    """The candidate that ratios were meant to be relative to; whether it was measured is another question."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Proofs and failures, by candidate."""
    designs: list[dict[str, Any]] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    """The records' folders."""
    provenances: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    """The settings that all share."""
    examination: Examination | None = None
    """What the doctor found: the first examination there is."""
    unread: list[str] = field(default_factory=list)
    """Sentences on what was left out of the records, since it is damaged."""

    def entries_of(self, candidate: str) -> list[RecordedRun]:
        """A candidate's runs, with what they are paired by."""
        return [entry for entry in self.entries if entry.candidate == candidate]

    def runs_of(self, candidate: str) -> dict[tuple[int, int], RunRecord]:
        """A candidate's runs by repeat."""
        return {entry.repeat: entry.run for entry in self.entries_of(candidate)}


@dataclass(frozen=True)
class _PartCandidate:
    """A candidate of one part, before it gets the name that it has in the pool."""

    candidate: Candidate
    ranks: int | None
    host: str | None
    runs: list[tuple[int, int, RunRecord]]
    """Repeat, moment, and the run itself."""


@dataclass(frozen=True)
class _RecordPart:
    """An experiment, or all runs that stand alone."""

    members: list[_PartCandidate]
    reference: Candidate | None
    events: list[dict[str, Any]]
    designs: list[dict[str, Any]]
    sources: list[str]
    provenances: list[dict[str, Any]]
    config: dict[str, Any]
    examination: Examination | None = None
    unread: list[str] = field(default_factory=list)


def collect_records(records: Sequence[ExperimentRecord | RunRecord]) -> RecordSet:
    """Pools records; candidates of different ones that are called the same get a name that tells them apart."""
    parts = _parts(records)
    candidates, entries, events = list[Candidate](), list[RecordedRun](), list[dict[str, Any]]()
    reference = None
    for index, (part, names) in enumerate(zip(parts, _names(parts), strict=True)):
        by_old_name = {m.candidate.name: name for m, name in zip(part.members, names, strict=True)}
        for member, name in zip(part.members, names, strict=True):
            candidates.append(replace(member.candidate, name=name))
            entries += [RecordedRun(name, (index, repeat), (index, moment), run) for repeat, moment, run in member.runs]
            if index == 0 and member.candidate is part.reference:
                reference = name
        for event in part.events:
            named = event.get("candidate")
            events.append(event | {"candidate": by_old_name.get(named or "", named)})
    return RecordSet(
        candidates=candidates,
        entries=entries,
        reference=reference,
        events=events,
        designs=[design for part in parts for design in part.designs],
        sources=[source for part in parts for source in part.sources],
        provenances=[provenance for part in parts for provenance in part.provenances],
        config=_shared([part.config for part in parts]),
        examination=next((part.examination for part in parts if part.examination is not None), None),
        unread=[sentence for part in parts for sentence in part.unread],
    )


def _parts(records: Sequence[ExperimentRecord | RunRecord]) -> list[_RecordPart]:
    """A part per experiment, and one for all runs that stand alone."""
    for record in records:
        for run in [record] if isinstance(record, RunRecord) else [measured.run for measured in record.runs]:
            check_comparable(run)
    experiments = [_of_experiment(record) for record in records if isinstance(record, ExperimentRecord)]
    alone = [record for record in records if isinstance(record, RunRecord)]
    return experiments + ([_of_runs(alone)] if alone else [])


def _of_experiment(record: ExperimentRecord) -> _RecordPart:
    members = []
    for candidate in record.candidates:
        runs = [(m.repeat, m.repeat, m.run) for m in record.runs if m.candidate is candidate]
        planned = 1 if candidate.role == "baseline" else record.design.get("ranks")
        ranks = _ranks(runs[0][2]) if runs else planned
        members.append(_PartCandidate(candidate, ranks, record.provenance.get("host"), runs))
    return _RecordPart(
        members=members,
        reference=next((c for c in record.candidates if c.name == record.design.get("reference")), None),
        events=record.events,
        designs=[record.design],
        sources=[str(record.path)],
        provenances=[record.provenance],
        config=record.config,
        examination=record.examination,
        unread=record.unread,
    )


def _of_runs(runs: list[RunRecord]) -> _RecordPart:
    """Runs of the same strategy and settings, on as many ranks of the same host, are repeats of one candidate."""
    shared = _shared([run.config for run in runs])
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        settings = {key: value for key, value in run.config.items() if key not in NOT_A_SETTING}
        identity = [run.config["strategy"], _ranks(run), run.provenance.get("host"), settings]
        groups.setdefault(json.dumps(identity, sort_keys=True, default=str), []).append(run)
    seeded = [_by_seed(members) for members in groups.values()]
    repeats = {key: number for number, key in enumerate(sorted({key for group in seeded for key in group}))}
    moments = {id(run): number for number, run in enumerate(runs)}
    members = []
    for group in seeded:
        first = next(iter(group.values()))
        own = {k: v for k, v in first.config.items() if k not in shared and k not in NOT_A_SETTING}
        name = " ".join([first.config["strategy"], *[f"{k}={v}" for k, v in own.items()]])
        candidate = Candidate(name, first.config["strategy"], own, _role(first), first.topology["lossless"])
        made = [(repeats[key], moments[id(run)], run) for key, run in group.items()]
        members.append(_PartCandidate(candidate, _ranks(first), first.provenance.get("host"), made))
    return _RecordPart(
        members=members,
        reference=_reference([member.candidate for member in members]),
        events=[],
        designs=[],
        sources=[str(run.path) for run in runs],
        provenances=[run.provenance for run in runs],
        config=shared,
    )


def _reference(candidates: Sequence[Candidate]) -> Candidate:
    """As in an experiment: `ddp`, else the first that could be picked, else the first."""
    eligible = [candidate for candidate in candidates if candidate.role == "candidate"]
    named = [candidate for candidate in eligible if candidate.strategy == "ddp"]
    return (named or eligible or list(candidates))[0]


def _role(run: RunRecord) -> CandidateRole:
    if not run.topology["exchanges"]:
        return "bound"
    return "baseline" if _trains_alone(run) else "candidate"


def _trains_alone(run: RunRecord) -> bool:
    return int(run.topology["workers"]) == 1 and not run.topology.get("servers")


def _ranks(run: RunRecord) -> int:
    """The world size; what trains in one process does so however many were started."""
    return 1 if _trains_alone(run) else int(run.topology.get("world_size") or run.topology["workers"])


def _by_seed(runs: Sequence[RunRecord]) -> dict[tuple[int, int], RunRecord]:
    """A candidate's runs by seed, and by how many of that seed came before."""
    seen = Counter[int]()
    found = {}
    for run in sorted(runs, key=lambda run: str(run.path)):
        seed = int(run.config.get("seed") or 0)
        found[seed, seen[seed]] = run
        seen[seed] += 1
    return found


def _names(parts: Sequence[_RecordPart]) -> list[list[str]]:
    """Per part, what its candidates are called in the pool: as before, with what tells them from their likes."""
    shared = _shared([part.config for part in parts])
    hosts = {member.host for part in parts for member in part.members}
    likes = defaultdict[str, set[int | None]](set)
    settled = list[tuple[_PartCandidate, str]]()
    for part in parts:
        own = [f"{k}={v}" for k, v in part.config.items() if k not in shared and k not in NOT_A_SETTING]
        settled += [(member, " ".join([member.candidate.name, *own])) for member in part.members]
    for member, name in settled:
        likes[name].add(member.ranks)
    taken = set[str]()
    names = []
    for member, name in settled:
        ranks = [f"ranks={member.ranks}"] if len(likes[name]) > 1 else []
        host = [f"@{member.host}"] if len(hosts) > 1 and member.host else []
        names.append(_unused(" ".join([name, *ranks, *host]), taken))
    in_order = iter(names)
    return [[next(in_order) for _ in part.members] for part in parts]


def _unused(name: str, taken: set[str]) -> str:
    """The name, with a number that no other has where it is taken; takes it."""
    number, unused = 1, name
    while unused in taken:
        number += 1
        unused = f"{name} ({number})"
    taken.add(unused)
    return unused


def _shared(configs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The settings that all configurations have in common."""
    first, *others = configs
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
