"""Strategies side by side: every figure of the comparison table, from records alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.analysis.caveats import caveats
from paceline.analysis.decision import ERROR_RATE, Decision, decide
from paceline.analysis.parting import Parting, partings
from paceline.analysis.pool import Pool
from paceline.analysis.ranks import RankRow, imbalance, rank_rows, uneven
from paceline.analysis.statistics import Estimate, of_levels, of_shares, of_times, paired_difference, paired_ratio
from paceline.analysis.timing import step_time, windows_of
from paceline.records import RunRecord
from paceline.records.experiment import Contender

Repeat = tuple[int, int]


@dataclass(frozen=True)
class Row:
    """One contender's figures. A figure is None where nothing was measured."""

    contender: Contender
    repeats: int
    step_s: Estimate | None
    """Time per iteration."""
    samples_per_s: Estimate | None
    ratio: Estimate | None
    """Its time per sample ÷ the reference's, paired by repeat; with equal batches, the ratio of the step times."""
    exposed: Estimate | None
    """The share of the step that goes away when nothing is exchanged: 1 − the bound's step ÷ this one's, paired."""
    busiest_sent_bytes: int | None
    """What the rank that sends most puts on the wire in a step, by the plan: gradients and broadcast buffers."""
    imbalance: float | None
    """The bytes that the busiest rank moves, in and out, ÷ those of the least busy."""
    train_loss: Estimate | None
    test_loss: Estimate | None
    test_accuracy: Estimate | None
    peak_bytes: float | None
    """Of the rank that needed most, while training."""
    workers: int | None
    batch: int | None
    ranks: list[RankRow]
    accuracy_gain: Estimate | None
    """Its test accuracy less the reference's, paired by repeat; an interval for all contenders together."""
    uneven: float | None
    """By how much the ranks' median steps differ, where that should not be."""
    failure: str | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        values = asdict(self)
        del values["contender"]
        return {"name": self.contender.name, **asdict(self.contender), **values}


@dataclass(frozen=True)
class Proof:
    """The proof of parity of one contender."""

    contender: str
    error: float
    tolerance: float
    lossless: bool
    ranks: int
    steps: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self) | {"holds": self.holds}

    @property
    def holds(self) -> bool:
        """Whether the gradients are the same up to rounding."""
        return self.error < self.tolerance


@dataclass(frozen=True)
class Comparison:
    """The whole answer, best first."""

    pool: Pool
    rows: list[Row]
    decision: Decision
    proofs: list[Proof]
    partings: list[Parting]
    warnings: list[str]
    interrupted: bool

    @property
    def reference(self) -> str | None:
        """The contender that ratios are relative to."""
        return self.pool.reference

    def row(self, name: str) -> Row:
        """A contender's row."""
        return next(row for row in self.rows if row.contender.name == name)

    def speed_up(self, name: str, over: str) -> Estimate | None:
        """How many times the samples per second of another contender this one trains, paired by repeat."""
        return paired_ratio(cost_per_sample(self.pool, over), cost_per_sample(self.pool, name))

    def over_one_process(self) -> tuple[Row, Estimate] | None:
        """The baseline of the fastest candidate, and how many times as fast as it that candidate is."""
        if self.decision.first is None:
            return None
        settings = self.row(self.decision.first).contender.settings
        alike = [row for row in self.with_role("baseline") if row.contender.settings == settings]
        gain = self.speed_up(self.decision.first, alike[0].contender.name) if alike else None
        return (alike[0], gain) if gain is not None else None

    @property
    def pick(self) -> str | None:
        """What to train with: one process where that is faster for certain, else the winner, if there is one."""
        baseline = self.over_one_process()
        if baseline is not None and baseline[1].high is not None and baseline[1].high < 1:
            return baseline[0].contender.name
        return self.decision.first if self.decision.outcome == "winner" else None

    def with_role(self, role: str) -> list[Row]:
        """The rows of the candidates, the bounds or the baselines that were measured."""
        return [row for row in self.rows if row.contender.role == role and row.step_s is not None]


def compare(pool: Pool) -> Comparison:
    """Everything that the records of a pool say about its contenders."""
    costs = {contender.name: cost_per_sample(pool, contender.name) for contender in pool.contenders}
    failures = {e["contender"]: e["message"] for e in pool.events if e["event"] == "failure"}
    bounds = [contender for contender in pool.contenders if contender.role == "bound"]
    rows = [_row(pool, contender, costs, bounds, failures.get(contender.name)) for contender in pool.contenders]
    slowest = float("inf")
    rows.sort(key=lambda row: statistics.median(costs[row.contender.name].values() or [slowest]))
    looks = max((design.get("looks", 1) for design in pool.designs), default=1)
    return Comparison(
        pool=pool,
        rows=rows,
        decision=decide(pool.contenders, costs, looks),
        proofs=[_proof(event) for event in pool.events if event["event"] == "parity"],
        partings=partings(pool),
        warnings=list(caveats(pool, {row.contender.name: row.uneven for row in rows})),
        interrupted=any(event["event"] == "interrupted" for event in pool.events),
    )


def cost_per_sample(pool: Pool, contender: str) -> dict[Repeat, float]:
    """Seconds per sample trained, by repeat."""
    costs = {}
    for repeat, run in pool.runs_of(contender).items():
        step_s, samples = step_time(windows_of(run)), _samples_per_step(run)
        if step_s and samples:
            costs[repeat] = step_s / samples
    return costs


def _samples_per_step(run: RunRecord) -> float | None:
    logs = run.events_of("log")[1:]
    steps = sum(len(event["losses"]) for event in logs)
    return sum(event["samples"] for event in logs) / steps if steps else None


def _row(
    pool: Pool,
    contender: Contender,
    costs: Mapping[str, Mapping[Repeat, float]],
    bounds: Sequence[Contender],
    failure: str | None,
) -> Row:
    runs = pool.runs_of(contender.name)
    own = costs[contender.name]
    times = [step_time(windows_of(runs[repeat])) for repeat in own]
    ranks = rank_rows(list(runs.values()))
    sent = [rank.sent_bytes for rank in ranks if rank.sent_bytes is not None]
    reference = costs.get(pool.reference or "", {})
    first = next(iter(runs.values()), None)
    return Row(
        contender=contender,
        repeats=len(own),
        step_s=of_times([time for time in times if time is not None]),
        samples_per_s=of_times([1 / cost for cost in own.values()]),
        ratio=paired_ratio(own, reference),
        exposed=_exposed(contender, own, costs, bounds),
        busiest_sent_bytes=max(sent, default=None),
        imbalance=imbalance(ranks),
        train_loss=of_levels(_figures(runs, lambda s: s["average_loss"])),
        test_loss=of_levels(_figures(runs, lambda s: s["test"]["loss"])),
        test_accuracy=of_shares(_figures(runs, lambda s: s["test"]["accuracy"])),
        peak_bytes=max([rank.peak_bytes for rank in ranks if rank.peak_bytes is not None], default=None),
        workers=first.topology["workers"] if first else None,
        batch=first.topology["batch"] if first else None,
        ranks=ranks,
        accuracy_gain=_accuracy_gain(pool, contender.name),
        uneven=uneven(ranks) if first and first.topology["exchanges"] else None,
        failure=failure,
    )


def _exposed(
    contender: Contender,
    own: Mapping[Repeat, float],
    costs: Mapping[str, Mapping[Repeat, float]],
    bounds: Sequence[Contender],
) -> Estimate | None:
    """Against the bound under the same settings; undefined for what exchanges nothing anyway."""
    alike = [bound for bound in bounds if bound.settings == contender.settings]
    if contender.role != "candidate" or not alike:
        return None
    bound = costs[alike[0].name]
    return of_levels([1 - bound[repeat] / own[repeat] for repeat in own if repeat in bound])


def _accuracy_gain(pool: Pool, name: str) -> Estimate | None:
    if pool.reference is None or name == pool.reference:
        return None
    level = 1 - ERROR_RATE / max(1, len(pool.contenders) - 1)
    return paired_difference(_accuracies(pool, name), _accuracies(pool, pool.reference), level)


def _accuracies(pool: Pool, name: str) -> dict[Repeat, float]:
    tests = {repeat: (run.summary or {}).get("test") or {} for repeat, run in pool.runs_of(name).items()}
    return {repeat: test["accuracy"] for repeat, test in tests.items() if test.get("accuracy") is not None}


def _figures(runs: Mapping[Repeat, RunRecord], read: Callable[[dict[str, Any]], float | None]) -> list[float]:
    found = []
    for run in runs.values():
        try:
            value = read(run.summary or {})
        except KeyError:
            continue
        if value is not None:
            found.append(value)
    return found


def _proof(event: Mapping[str, Any]) -> Proof:
    return Proof(
        contender=event["contender"],
        error=float("inf") if event["error"] is None else event["error"],
        tolerance=event["tolerance"],
        lossless=event["lossless"],
        ranks=event["ranks"],
        steps=event["steps"],
    )
