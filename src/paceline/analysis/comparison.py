"""Strategies side by side: every figure of the comparison table, from records alone."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from paceline.analysis.caveats import caveats
from paceline.analysis.decision import ERROR_RATE, Decision, decide
from paceline.analysis.loss_difference import LossDifference, loss_differences
from paceline.analysis.ranks import RankRow, imbalance, rank_rows, uneven
from paceline.analysis.record_set import RecordSet
from paceline.analysis.statistics import (
    Estimate,
    median_time,
    of_levels,
    of_shares,
    of_times,
    paired_difference,
    paired_ratio,
)
from paceline.analysis.steps.candidate_split import CandidateSplit, candidate_split
from paceline.analysis.steps.timing import profiled_steps, step_time, windows_of
from paceline.analysis.traffic.payload import Payload, payload_of
from paceline.analysis.traffic.wire import Wire, wire_of
from paceline.records import RunRecord
from paceline.records.examination import Examination
from paceline.records.experiment import Candidate
from paceline.records.writer import strict

MeasuredMoment = tuple[int, int]
Repeat = tuple[int, int]
Costs = Mapping[str, Mapping[MeasuredMoment, float]]
"""Seconds per sample, by candidate and moment."""

LEAST_ACCURACY_PAIRS = 3
"""From fewer seeds the spread between them cannot be told."""


@dataclass(frozen=True)
class CandidateRow:
    """One candidate's figures. A figure is None where nothing was measured."""

    candidate: Candidate
    repeats: int
    step_s: Estimate | None
    """Time per iteration."""
    samples_per_s: Estimate | None
    ratio: Estimate | None
    """Its time per sample ÷ the reference's, paired by repeat; with equal batches, the ratio of the step times."""
    split: CandidateSplit | None
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
    """Its test accuracy less the reference's, paired by seed, from three seeds or more; an interval for all candidates
    together."""
    uneven: float | None
    """By how much the ranks' median steps differ, where that should not be."""
    staleness: Estimate | None
    """How many updates old a gradient was when it came to a server, on average; None where ranks step together."""
    late_share: Estimate | None
    """The share of gradients that were older than they may be, and so damped or dropped."""
    failure: str | None
    """Why it is out; its figures are those until then."""

    @property
    def exposed(self) -> Estimate | None:
        """The share of the step in which ranks communicate and compute nothing; None for what exchanges nothing."""
        return self.split.exposed if self.split is not None and self.candidate.role == "candidate" else None

    @property
    def is_measured(self) -> bool:
        """Whether it has a time, and did not fail."""
        return self.step_s is not None and self.failure is None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: null for what is not a number."""
        values = asdict(self) | {"exposed": self.exposed and self.exposed.to_dict()}
        del values["candidate"]
        found: dict[str, Any] = strict({"name": self.candidate.name, **self.candidate.to_dict(), **values})
        return found


@dataclass(frozen=True)
class Proof:
    """The proof of parity of one candidate."""

    candidate: str
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

    record_set: RecordSet
    reference: str | None
    """The candidate that ratios and accuracies are relative to: the one that was meant to be, if it was measured."""
    rows: list[CandidateRow]
    """Best first, those that failed last."""
    decision: Decision
    proofs: list[Proof]
    loss_differences: list[LossDifference]
    warnings: list[str]
    interrupted: bool

    @cached_property
    def wires(self) -> dict[str, Wire]:
        """By candidate: what was on the wire in its typical run, the one of median speed; only looked at when asked."""
        found = {row.candidate.name: _wire(self.record_set, row.candidate.name) for row in self.rows}
        return {name: wire for name, wire in found.items() if wire is not None}

    @cached_property
    def payloads(self) -> dict[str, Payload]:
        """By candidate: what was counted at its sockets, in the run that is furthest from what was expected."""
        found = {row.candidate.name: _payload(self.record_set, row.candidate.name) for row in self.rows}
        return {name: payload for name, payload in found.items() if payload is not None}

    @property
    def examination(self) -> Examination | None:
        """What the doctor found on the machine, if it was asked."""
        return self.record_set.examination

    def row(self, name: str) -> CandidateRow:
        """A candidate's row."""
        return next(row for row in self.rows if row.candidate.name == name)

    def speed_up(self, name: str, over: str) -> Estimate | None:
        """How many times the samples per second of another candidate this one trains, paired by repeat."""
        return paired_ratio(cost_per_sample(self.record_set, over), cost_per_sample(self.record_set, name))

    def over_one_process(self) -> tuple[CandidateRow, Estimate] | None:
        """The baseline of the fastest candidate, and how many times as fast as it that candidate is.

        None where none was measured together with it: one of another machine or moment says nothing.
        """
        if self.decision.first is None:
            return None
        baselines = [row.candidate for row in self.with_role("baseline")]
        costs = {c.name: cost_per_sample(self.record_set, c.name) for c in baselines}
        costs[self.decision.first] = cost_per_sample(self.record_set, self.decision.first)
        baseline = _measured_with(self.row(self.decision.first).candidate, baselines, costs)
        gain = None if baseline is None else self.speed_up(self.decision.first, baseline.name)
        return None if baseline is None or gain is None else (self.row(baseline.name), gain)

    @property
    def pick(self) -> str | None:
        """What to train with: one process where that is faster for certain, else the winner, if there is one."""
        baseline = self.over_one_process()
        if baseline is not None and baseline[1].high is not None and baseline[1].high < 1:
            return baseline[0].candidate.name
        return self.decision.first if self.decision.outcome == "winner" else None

    def with_role(self, role: str) -> list[CandidateRow]:
        """The rows of the candidates, the bounds or the baselines that were measured and did not fail."""
        return [row for row in self.rows if row.candidate.role == role and row.is_measured]


def compare(record_set: RecordSet) -> Comparison:
    """Everything that the records of a pool say about its candidates."""
    costs = {candidate.name: cost_per_sample(record_set, candidate.name) for candidate in record_set.candidates}
    failures = {e["candidate"]: e["message"] for e in record_set.events if e["event"] == "failure"}
    reference = _reference(record_set, costs, failures)
    rows = [
        _row(record_set, candidate, costs, reference, failures.get(candidate.name))
        for candidate in record_set.candidates
    ]
    slowest = float("inf")
    rows.sort(key=lambda row: (row.failure is not None, median_time(costs[row.candidate.name].values() or [slowest])))
    looks = max((design.get("looks", 1) for design in record_set.designs), default=1)
    uneven_rows = {row.candidate.name: row.uneven for row in rows}
    return Comparison(
        record_set=record_set,
        reference=reference,
        rows=rows,
        decision=decide(record_set.candidates, costs, looks, failures.keys()),
        proofs=[_proof(event) for event in record_set.events if event["event"] == "parity"],
        loss_differences=loss_differences(record_set, reference),
        warnings=[*_other_reference(record_set, reference, failures), *caveats(record_set, uneven_rows)],
        interrupted=any(event["event"] == "interrupted" for event in record_set.events),
    )


def _wire(record_set: RecordSet, name: str) -> Wire | None:
    measured = sorted(
        (cost, number) for number, entry in enumerate(record_set.entries_of(name)) if (cost := _cost(entry.run))
    )
    if not measured:
        return None
    run = record_set.entries_of(name)[measured[(len(measured) - 1) // 2][1]].run
    if not run.lockstep:  # What ranks did in the step of one number did not happen together.
        return None
    return wire_of(run.timelines, run.topology.get("gradient_bytes"), without=profiled_steps(windows_of(run)))


def _payload(record_set: RecordSet, name: str) -> Payload | None:
    counted = [payload for run in record_set.runs_of(name).values() if (payload := payload_of(run)) is not None]
    return max(counted, key=lambda payload: payload.deviation or 0.0, default=None)


def _reference(record_set: RecordSet, costs: Costs, failed: Collection[str]) -> str | None:
    """The reference that was meant to be; where it was not measured, the first candidate that was, else the first."""
    measured = [c for c in record_set.candidates if costs[c.name] and c.name not in failed]
    names = [candidate.name for candidate in measured]
    if not names or record_set.reference in names:
        return record_set.reference
    return next((candidate.name for candidate in measured if candidate.role == "candidate"), names[0])


def _other_reference(record_set: RecordSet, reference: str | None, failed: Collection[str]) -> Iterable[str]:
    if record_set.reference is not None and reference != record_set.reference:
        what = "failed" if record_set.reference in failed else "was not measured"
        yield f"{record_set.reference} {what}, so ratios are to {reference}."


def _measured_with(candidate: Candidate, others: Sequence[Candidate], costs: Costs) -> Candidate | None:
    """The first of others under the same settings that was measured in moments that the candidate was measured in."""
    alike = (other for other in others if other.settings == candidate.settings)
    return next((other for other in alike if costs[candidate.name].keys() & costs[other.name].keys()), None)


def cost_per_sample(record_set: RecordSet, candidate: str) -> dict[MeasuredMoment, float]:
    """Seconds per sample trained, by the moment that it was measured in."""
    return {entry.moment: cost for entry in record_set.entries_of(candidate) if (cost := _cost(entry.run)) is not None}


def _cost(run: RunRecord) -> float | None:
    step_s, samples = step_time(windows_of(run)), _samples_per_step(run)
    return step_s / samples if step_s and samples else None


def _samples_per_step(run: RunRecord) -> float | None:
    logs = run.events_of("log")[1:]
    steps = sum(len(event["losses"]) for event in logs)
    return sum(event["samples"] for event in logs) / steps if steps else None


def _row(
    record_set: RecordSet,
    candidate: Candidate,
    costs: Costs,
    reference: str | None,
    failure: str | None,
) -> CandidateRow:
    entries = record_set.entries_of(candidate.name)
    runs = [entry.run for entry in entries]
    own = costs[candidate.name]
    times = [step_time(windows_of(entry.run)) for entry in entries if entry.moment in own]
    ranks = rank_rows(runs)
    sent = [size for run in runs for size in ((run.summary or {}).get("traffic") or {}).get("sent_bytes", [])]
    first = next(iter(runs), None)
    return CandidateRow(
        candidate=candidate,
        repeats=len(own),
        step_s=of_times([time for time in times if time is not None]),
        samples_per_s=of_times([1 / cost for cost in own.values()]),
        ratio=paired_ratio(own, costs.get(reference or "", {})),
        split=candidate_split(runs) if own else None,  # What has no time per iteration has no shares of it either.
        above_bound=_above_bound(candidate, record_set.candidates, costs),
        busiest_sent_bytes=max(sent, default=None),
        imbalance=imbalance(ranks),
        train_loss=of_levels(_known((run.summary or {}).get("average_loss") for run in runs)),
        test_loss=of_levels(_known(_test(run).get("loss") for run in runs)),
        test_accuracy=of_shares(_known(_test(run).get("accuracy") for run in runs)),
        peak_bytes=max([rank.peak_bytes for rank in ranks if rank.peak_bytes is not None], default=None),
        workers=first.topology["workers"] if first else None,
        batch=first.topology["batch"] if first else None,
        ranks=ranks,
        accuracy_gain=_accuracy_gain(record_set, candidate.name, reference),
        uneven=uneven(ranks) if first and first.topology["exchanges"] and first.lockstep else None,
        staleness=of_levels(_known(staleness["mean"] for staleness in map(_staleness, runs) if staleness)),
        late_share=of_shares(_known(_late(staleness) for staleness in map(_staleness, runs) if staleness)),
        failure=failure,
    )


def _above_bound(candidate: Candidate, candidates: Sequence[Candidate], costs: Costs) -> Estimate | None:
    """Against the bound under the same settings that was measured with it; undefined for what exchanges nothing."""
    bound = _measured_with(candidate, [other for other in candidates if other.role == "bound"], costs)
    if candidate.role != "candidate" or bound is None:
        return None
    own, least = costs[candidate.name], costs[bound.name]
    return of_levels([1 - least[moment] / own[moment] for moment in own if moment in least])


def _accuracy_gain(record_set: RecordSet, name: str, reference: str | None) -> Estimate | None:
    """A difference of accuracies, with an interval that allows for the test set being one of many that could be.

    Accuracies are multiples of 1 ÷ the samples tested: a few repeats may have the very same difference, and no spread,
    by a single sample. Each side has the binomial variance p(1 − p)/n over the choice of test samples. All repeats are
    tested on the same ones, so it stays however many there are.
    """
    if reference is None or name == reference:
        return None
    ones, others = _accuracies(record_set, name), _accuracies(record_set, reference)
    common = [repeat for repeat in ones if repeat in others]
    tested = _known(
        _test(entry.run).get("samples") for one in (name, reference) for entry in record_set.entries_of(one)
    )
    if len(common) < LEAST_ACCURACY_PAIRS or not tested or min(tested) < 1:
        return None
    shares = [statistics.fmean(side[repeat] for repeat in common) for side in (ones, others)]
    variance = sum(share * (1 - share) for share in shares) / min(tested)
    level = 1 - ERROR_RATE / max(1, len(record_set.candidates) - 1)
    return paired_difference(ones, others, level, shared_variance=variance)


def _accuracies(record_set: RecordSet, name: str) -> dict[Repeat, float]:
    tests = {repeat: _test(run).get("accuracy") for repeat, run in record_set.runs_of(name).items()}
    return {repeat: accuracy for repeat, accuracy in tests.items() if accuracy is not None}


def _staleness(run: RunRecord) -> dict[str, Any]:
    return (run.summary or {}).get("staleness") or {}


def _late(staleness: Mapping[str, Any]) -> float | None:
    return (staleness["damped"] + staleness["dropped"]) / staleness["gradients"] if staleness["gradients"] else None


def _test(run: RunRecord) -> dict[str, Any]:
    return (run.summary or {}).get("test") or {}


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _proof(event: Mapping[str, Any]) -> Proof:
    return Proof(
        candidate=event["candidate"],
        error=float("inf") if event["error"] is None else event["error"],
        tolerance=event["tolerance"],
        lossless=event["lossless"],
        ranks=event["ranks"],
        steps=event["steps"],
    )
