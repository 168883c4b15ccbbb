"""Strategies side by side: every figure of the comparison table, from records alone."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from paceline.analysis.caveats import caveats
from paceline.analysis.decision import ERROR_RATE, Decision, decide
from paceline.analysis.parting import Parting, partings
from paceline.analysis.payload import Payload, payload_of
from paceline.analysis.pool import Pool
from paceline.analysis.ranks import RankRow, imbalance, rank_rows, uneven
from paceline.analysis.row_split import RowSplit, row_split
from paceline.analysis.statistics import (
    Estimate,
    median_time,
    of_levels,
    of_shares,
    of_times,
    paired_difference,
    paired_ratio,
)
from paceline.analysis.timing import profiled_steps, step_time, windows_of
from paceline.analysis.wire import Wire, wire_of
from paceline.records import RunRecord
from paceline.records.examination import Examination
from paceline.records.experiment import Contender
from paceline.records.writer import strict

Moment = tuple[int, int]
Repeat = tuple[int, int]
Costs = Mapping[str, Mapping[Moment, float]]
"""Seconds per sample, by contender and moment."""

LEAST_ACCURACY_PAIRS = 3
"""From fewer seeds the spread between them cannot be told."""


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
    split: RowSplit | None
    """Where the step goes, as measured; None where events were not collected."""
    above_bound: Estimate | None
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
    """Its test accuracy less the reference's, paired by seed, from three seeds or more; an interval for all contenders
    together."""
    uneven: float | None
    """By how much the ranks' median steps differ, where that should not be."""
    gradient_age: Estimate | None
    """How many updates old a gradient was when it came to a server, on average; None where ranks step together."""
    late_share: Estimate | None
    """The share of gradients that were older than they may be, and so damped or dropped."""
    failure: str | None
    """Why it is out; its figures are those until then."""

    @property
    def exposed(self) -> Estimate | None:
        """The share of the step in which ranks communicate and compute nothing; None for what exchanges nothing."""
        return self.split.exposed if self.split is not None and self.contender.role == "candidate" else None

    @property
    def is_measured(self) -> bool:
        """Whether it has a time, and did not fail."""
        return self.step_s is not None and self.failure is None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: null for what is not a number."""
        values = asdict(self) | {"exposed": self.exposed and self.exposed.to_dict()}
        del values["contender"]
        found: dict[str, Any] = strict({"name": self.contender.name, **self.contender.to_dict(), **values})
        return found


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
        """As JSON has it: null for an error that is infinite."""
        found: dict[str, Any] = strict(asdict(self) | {"holds": self.holds})
        return found

    @property
    def holds(self) -> bool:
        """Whether the gradients are the same up to rounding."""
        return self.error < self.tolerance


@dataclass(frozen=True)
class Comparison:
    """The whole answer, best first."""

    pool: Pool
    reference: str | None
    """The contender that ratios and accuracies are relative to: the one that was meant to be, if it was measured."""
    rows: list[Row]
    """Best first, those that failed last."""
    decision: Decision
    proofs: list[Proof]
    partings: list[Parting]
    warnings: list[str]
    interrupted: bool

    @cached_property
    def wires(self) -> dict[str, Wire]:
        """By contender: what was on the wire in its typical run, the one of median speed; only looked at when asked."""
        found = {row.contender.name: _wire(self.pool, row.contender.name) for row in self.rows}
        return {name: wire for name, wire in found.items() if wire is not None}

    @cached_property
    def payloads(self) -> dict[str, Payload]:
        """By contender: what was counted at its sockets, in the run that is furthest from what was expected."""
        found = {row.contender.name: _payload(self.pool, row.contender.name) for row in self.rows}
        return {name: payload for name, payload in found.items() if payload is not None}

    @property
    def examination(self) -> Examination | None:
        """What the doctor found on the machine, if it was asked."""
        return self.pool.examination

    def row(self, name: str) -> Row:
        """A contender's row."""
        return next(row for row in self.rows if row.contender.name == name)

    def speed_up(self, name: str, over: str) -> Estimate | None:
        """How many times the samples per second of another contender this one trains, paired by repeat."""
        return paired_ratio(cost_per_sample(self.pool, over), cost_per_sample(self.pool, name))

    def over_one_process(self) -> tuple[Row, Estimate] | None:
        """The baseline of the fastest candidate, and how many times as fast as it that candidate is.

        None where none was measured together with it: one of another machine or moment says nothing.
        """
        if self.decision.first is None:
            return None
        baselines = [row.contender for row in self.with_role("baseline")]
        costs = {c.name: cost_per_sample(self.pool, c.name) for c in baselines}
        costs[self.decision.first] = cost_per_sample(self.pool, self.decision.first)
        baseline = _measured_with(self.row(self.decision.first).contender, baselines, costs)
        gain = None if baseline is None else self.speed_up(self.decision.first, baseline.name)
        return None if baseline is None or gain is None else (self.row(baseline.name), gain)

    @property
    def pick(self) -> str | None:
        """What to train with: one process where that is faster for certain, else the winner, if there is one."""
        baseline = self.over_one_process()
        if baseline is not None and baseline[1].high is not None and baseline[1].high < 1:
            return baseline[0].contender.name
        return self.decision.first if self.decision.outcome == "winner" else None

    def with_role(self, role: str) -> list[Row]:
        """The rows of the candidates, the bounds or the baselines that were measured and did not fail."""
        return [row for row in self.rows if row.contender.role == role and row.is_measured]


def compare(pool: Pool) -> Comparison:
    """Everything that the records of a pool say about its contenders."""
    costs = {contender.name: cost_per_sample(pool, contender.name) for contender in pool.contenders}
    failures = {e["contender"]: e["message"] for e in pool.events if e["event"] == "failure"}
    reference = _reference(pool, costs, failures)
    rows = [_row(pool, contender, costs, reference, failures.get(contender.name)) for contender in pool.contenders]
    slowest = float("inf")
    rows.sort(key=lambda row: (row.failure is not None, median_time(costs[row.contender.name].values() or [slowest])))
    looks = max((design.get("looks", 1) for design in pool.designs), default=1)
    uneven_rows = {row.contender.name: row.uneven for row in rows}
    return Comparison(
        pool=pool,
        reference=reference,
        rows=rows,
        decision=decide(pool.contenders, costs, looks, failures.keys()),
        proofs=[_proof(event) for event in pool.events if event["event"] == "parity"],
        partings=partings(pool, reference),
        warnings=[*_other_reference(pool, reference, failures), *caveats(pool, uneven_rows)],
        interrupted=any(event["event"] == "interrupted" for event in pool.events),
    )


def _wire(pool: Pool, name: str) -> Wire | None:
    measured = sorted(
        (cost, number) for number, entry in enumerate(pool.entries_of(name)) if (cost := _cost(entry.run))
    )
    if not measured:
        return None
    run = pool.entries_of(name)[measured[(len(measured) - 1) // 2][1]].run
    if not run.lockstep:  # What ranks did in the step of one number did not happen together.
        return None
    return wire_of(run.timelines, run.topology.get("gradient_bytes"), without=profiled_steps(windows_of(run)))


def _payload(pool: Pool, name: str) -> Payload | None:
    counted = [payload for run in pool.runs_of(name).values() if (payload := payload_of(run)) is not None]
    return max(counted, key=lambda payload: payload.deviation or 0.0, default=None)


def _reference(pool: Pool, costs: Costs, failed: Collection[str]) -> str | None:
    """The reference that was meant to be; where it was not measured, the first candidate that was, else the first."""
    measured = [c for c in pool.contenders if costs[c.name] and c.name not in failed]
    names = [contender.name for contender in measured]
    if not names or pool.reference in names:
        return pool.reference
    return next((contender.name for contender in measured if contender.role == "candidate"), names[0])


def _other_reference(pool: Pool, reference: str | None, failed: Collection[str]) -> Iterable[str]:
    if pool.reference is not None and reference != pool.reference:
        what = "failed" if pool.reference in failed else "was not measured"
        yield f"{pool.reference} {what}, so ratios are to {reference}."


def _measured_with(contender: Contender, others: Sequence[Contender], costs: Costs) -> Contender | None:
    """The first of others under the same settings that was measured in moments that the contender was measured in."""
    alike = (other for other in others if other.settings == contender.settings)
    return next((other for other in alike if costs[contender.name].keys() & costs[other.name].keys()), None)


def cost_per_sample(pool: Pool, contender: str) -> dict[Moment, float]:
    """Seconds per sample trained, by the moment that it was measured in."""
    return {entry.moment: cost for entry in pool.entries_of(contender) if (cost := _cost(entry.run)) is not None}


def _cost(run: RunRecord) -> float | None:
    step_s, samples = step_time(windows_of(run)), _samples_per_step(run)
    return step_s / samples if step_s and samples else None


def _samples_per_step(run: RunRecord) -> float | None:
    logs = run.events_of("log")[1:]
    steps = sum(len(event["losses"]) for event in logs)
    return sum(event["samples"] for event in logs) / steps if steps else None


def _row(
    pool: Pool,
    contender: Contender,
    costs: Costs,
    reference: str | None,
    failure: str | None,
) -> Row:
    entries = pool.entries_of(contender.name)
    runs = [entry.run for entry in entries]
    own = costs[contender.name]
    times = [step_time(windows_of(entry.run)) for entry in entries if entry.moment in own]
    ranks = rank_rows(runs)
    sent = [size for run in runs for size in ((run.summary or {}).get("traffic") or {}).get("sent_bytes", [])]
    first = next(iter(runs), None)
    return Row(
        contender=contender,
        repeats=len(own),
        step_s=of_times([time for time in times if time is not None]),
        samples_per_s=of_times([1 / cost for cost in own.values()]),
        ratio=paired_ratio(own, costs.get(reference or "", {})),
        split=row_split(runs) if own else None,  # What has no time per iteration has no shares of it either.
        above_bound=_above_bound(contender, pool.contenders, costs),
        busiest_sent_bytes=max(sent, default=None),
        imbalance=imbalance(ranks),
        train_loss=of_levels(_known((run.summary or {}).get("average_loss") for run in runs)),
        test_loss=of_levels(_known(_test(run).get("loss") for run in runs)),
        test_accuracy=of_shares(_known(_test(run).get("accuracy") for run in runs)),
        peak_bytes=max([rank.peak_bytes for rank in ranks if rank.peak_bytes is not None], default=None),
        workers=first.topology["workers"] if first else None,
        batch=first.topology["batch"] if first else None,
        ranks=ranks,
        accuracy_gain=_accuracy_gain(pool, contender.name, reference),
        uneven=uneven(ranks) if first and first.topology["exchanges"] and first.lockstep else None,
        gradient_age=of_levels(_known(ages["mean"] for ages in map(_ages, runs) if ages)),
        late_share=of_shares(_known(_late(ages) for ages in map(_ages, runs) if ages)),
        failure=failure,
    )


def _above_bound(contender: Contender, contenders: Sequence[Contender], costs: Costs) -> Estimate | None:
    """Against the bound under the same settings that was measured with it; undefined for what exchanges nothing."""
    bound = _measured_with(contender, [other for other in contenders if other.role == "bound"], costs)
    if contender.role != "candidate" or bound is None:
        return None
    own, least = costs[contender.name], costs[bound.name]
    return of_levels([1 - least[moment] / own[moment] for moment in own if moment in least])


def _accuracy_gain(pool: Pool, name: str, reference: str | None) -> Estimate | None:
    """A difference of accuracies, with an interval that allows for the test set being one of many that could be.

    Accuracies are multiples of 1 ÷ the samples tested: a few repeats may have the very same difference, and no spread,
    by a single sample. Each side has the binomial variance p(1 − p)/n over the choice of test samples. All repeats are
    tested on the same ones, so it stays however many there are.
    """
    if reference is None or name == reference:
        return None
    ones, others = _accuracies(pool, name), _accuracies(pool, reference)
    common = [repeat for repeat in ones if repeat in others]
    tested = _known(_test(entry.run).get("samples") for one in (name, reference) for entry in pool.entries_of(one))
    if len(common) < LEAST_ACCURACY_PAIRS or not tested or min(tested) < 1:
        return None
    shares = [statistics.fmean(side[repeat] for repeat in common) for side in (ones, others)]
    variance = sum(share * (1 - share) for share in shares) / min(tested)
    level = 1 - ERROR_RATE / max(1, len(pool.contenders) - 1)
    return paired_difference(ones, others, level, shared_variance=variance)


def _accuracies(pool: Pool, name: str) -> dict[Repeat, float]:
    tests = {repeat: _test(run).get("accuracy") for repeat, run in pool.runs_of(name).items()}
    return {repeat: accuracy for repeat, accuracy in tests.items() if accuracy is not None}


def _ages(run: RunRecord) -> dict[str, Any]:
    return (run.summary or {}).get("ages") or {}


def _late(ages: Mapping[str, Any]) -> float | None:
    return (ages["damped"] + ages["dropped"]) / ages["gradients"] if ages["gradients"] else None


def _test(run: RunRecord) -> dict[str, Any]:
    return (run.summary or {}).get("test") or {}


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _proof(event: Mapping[str, Any]) -> Proof:
    return Proof(
        contender=event["contender"],
        error=float("inf") if event["error"] is None else event["error"],
        tolerance=event["tolerance"],
        lossless=event["lossless"],
        ranks=event["ranks"],
        steps=event["steps"],
    )
