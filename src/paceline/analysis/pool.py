"""Brings records together for one comparison: an experiment, several, or runs that were made one by one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.records import RunRecord
from paceline.records.experiment import Contender, ExperimentRecord, Role

NOT_A_SETTING = frozenset({"seed", "strategy", "data_dir", "log_every", "timeout"})
"""What two runs of one contender may differ in."""


@dataclass(frozen=True)
class Entry:
    """A run in the pool."""

    contender: str
    repeat: tuple[int, int]
    """Which record it came with, and which repeat of it: figures are paired by this."""
    run: RunRecord


@dataclass(frozen=True)
class Pool:
    """Runs to compare, and what else their records say."""

    contenders: list[Contender]
    entries: list[Entry]
    reference: str | None
    """The contender that ratios are relative to."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Proofs and failures, by contender."""
    designs: list[dict[str, Any]] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    """The records' folders."""
    provenances: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    """The settings that all share."""

    def runs_of(self, contender: str) -> dict[tuple[int, int], RunRecord]:
        """A contender's runs by repeat."""
        return {entry.repeat: entry.run for entry in self.entries if entry.contender == contender}


def pool(records: Sequence[ExperimentRecord | RunRecord]) -> Pool:
    """Pools records; contenders of different ones that are called the same get a name that tells them apart."""
    parts = _parts(records)
    names = _distinct(parts)
    contenders = [
        replace(contender, name=names[index][contender.name])
        for index, part in enumerate(parts)
        for contender in part.contenders
    ]
    entries = [
        Entry(names[index][entry.contender], (index, entry.repeat[1]), entry.run)
        for index, part in enumerate(parts)
        for entry in part.entries
    ]
    events = [
        event | {"contender": names[index].get(event.get("contender", ""), event.get("contender"))}
        for index, part in enumerate(parts)
        for event in part.events
    ]
    first = parts[0]
    return Pool(
        contenders=contenders,
        entries=entries,
        reference=names[0].get(first.reference or "", first.reference),
        events=events,
        designs=[design for part in parts for design in part.designs],
        sources=[source for part in parts for source in part.sources],
        provenances=[provenance for part in parts for provenance in part.provenances],
        config=_shared([part.config for part in parts]),
    )


def _parts(records: Iterable[ExperimentRecord | RunRecord]) -> list[Pool]:
    """A pool per experiment, and one for all runs that stand alone."""
    experiments = [_of_experiment(record) for record in records if isinstance(record, ExperimentRecord)]
    alone = [record for record in records if isinstance(record, RunRecord)]
    return experiments + ([_of_runs(alone)] if alone else [])


def _of_experiment(record: ExperimentRecord) -> Pool:
    return Pool(
        contenders=record.contenders,
        entries=[Entry(m.contender.name, (0, m.repeat), m.run) for m in record.runs],
        reference=record.design.get("reference"),
        events=record.events,
        designs=[record.design],
        sources=[str(record.path)],
        provenances=[record.provenance],
        config=record.config,
    )


def _of_runs(runs: list[RunRecord]) -> Pool:
    """Runs of the same strategy and settings are repeats of one contender; what differs names it."""
    shared = _shared([run.config for run in runs])
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        settings = {key: value for key, value in run.config.items() if key not in NOT_A_SETTING}
        identity = [run.config["strategy"], run.topology["workers"], run.provenance.get("host"), settings]
        groups.setdefault(json.dumps(identity, sort_keys=True, default=str), []).append(run)
    contenders, entries = list[Contender](), list[Entry]()
    taken: dict[str, int] = {}
    for members in groups.values():
        first = members[0]
        own = {k: v for k, v in first.config.items() if k not in shared and k not in NOT_A_SETTING}
        name = _numbered(" ".join([first.config["strategy"], *[f"{k}={v}" for k, v in own.items()]]), taken)
        contenders.append(Contender(name, first.config["strategy"], own, _role(first), first.topology["lossless"]))
        entries += [Entry(name, (0, repeat), run) for repeat, run in enumerate(_by_seed(members))]
    return Pool(
        contenders=contenders,
        entries=entries,
        reference=contenders[0].name,
        sources=[str(run.path) for run in runs],
        provenances=[run.provenance for run in runs],
        config=shared,
    )


def _role(run: RunRecord) -> Role:
    if not run.topology["exchanges"]:
        return "bound"
    return "baseline" if run.topology["workers"] == 1 else "candidate"


def _by_seed(runs: list[RunRecord]) -> list[RunRecord]:
    return sorted(runs, key=lambda run: (run.config["seed"], str(run.path)))


def _distinct(parts: Sequence[Pool]) -> list[dict[str, str]]:
    """Per part, what its contenders are called in the pool."""
    hosts = [part.provenances[0].get("host") for part in parts]
    shared = _shared([part.config for part in parts])
    taken: dict[str, int] = {}
    names: list[dict[str, str]] = []
    for part, host in zip(parts, hosts, strict=True):
        own = [f"{k}={v}" for k, v in part.config.items() if k not in shared and k not in NOT_A_SETTING]
        suffix = " ".join([*own, *([f"@{host}"] if len(set(hosts)) > 1 else [])]) if len(parts) > 1 else ""
        names.append({c.name: _numbered(f"{c.name} {suffix}".strip(), taken) for c in part.contenders})
    return names


def _numbered(name: str, taken: dict[str, int]) -> str:
    taken[name] = taken.get(name, 0) + 1
    return name if taken[name] == 1 else f"{name} ({taken[name]})"


def _shared(configs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The settings that all configurations have in common."""
    first, *others = configs
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
