"""Comparison of strategies: every value of the comparison table, from records alone."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from paceline.analysis.caveats import caveats
from paceline.analysis.checkpoints import checkpoint_cost
from paceline.analysis.costs import CostTable, cost_of, cost_table
from paceline.analysis.decision import ERROR_RATE, Decision, decide
from paceline.analysis.divergence import DivergedRun, diverged_runs
from paceline.analysis.exclusions import ALTERNATIVES, Exclusion, exclusions
from paceline.analysis.gpu_use import gpu_busy, gpu_j_per_sample, gpu_power_w
from paceline.analysis.learning import Learning, accuracy_gain, converging_runs, learning_of
from paceline.analysis.loss_difference import LossDifference, loss_differences
from paceline.analysis.noise_scale import noise_scale
from paceline.analysis.ranks import RankRow, imbalance, rank_rows, rank_step_spread
from paceline.analysis.record_set import RecordSet
from paceline.analysis.statistics import (
    LEVEL,
    Estimate,
    estimate_levels,
    estimate_losses,
    estimate_shares,
    estimate_times,
    median_time,
)
from paceline.analysis.steps.candidate_split import CandidateSplit, candidate_split
from paceline.analysis.steps.timing import profiled_steps, step_time, windows_of, windows_of_attempt
from paceline.analysis.superlinear import SuperlinearGain, superlinear_gains, superlinear_notes
from paceline.analysis.traffic.payload import Payload, payload_of
from paceline.analysis.traffic.wire import Wire, wire_of
from paceline.errors import DivergenceError
from paceline.records import RunRecord
from paceline.records.events import EvaluationEvent, FailureEvent, InterruptedEvent, ParityEvent, events_of
from paceline.records.examination import Examination
from paceline.records.experiment.design import Candidate
from paceline.records.summary import StalenessSummary, Summary
from paceline.records.writer import json_safe


@dataclass(frozen=True)
class CandidateRow:
    """Results of one candidate. A value is None if nothing was measured."""

    candidate: Candidate
    repeats: int
    step_s: Estimate | None
    """Time per iteration."""
    samples_per_s: Estimate | None
    ratio: Estimate | None
    """Time per sample ÷ that of the reference, paired by repeat; with equal batches, the ratio of step times."""
    split: CandidateSplit | None
    """Measured time split of the step; None if events were not collected."""
    above_bound: Estimate | None
    """Share of the step that disappears without communication: 1 − step time of the bound ÷ this one's, paired."""
    busiest_sent_bytes: int | None
    """Bytes per step sent by the rank that sends most, by the plan: gradients and broadcast buffers."""
    imbalance: float | None
    """Bytes sent and received by the busiest rank ÷ those of the least busy rank."""
    train_loss: Estimate | None
    test_loss: Estimate | None
    test_accuracy: Estimate | None
    best_accuracy: Estimate | None
    """Highest test accuracy of a run; None if runs were tested only at their end."""
    best_step: float | None
    """Steps done when it was reached, the median over repeats."""
    peak_bytes: float | None
    """Peak memory of the rank that needed most, while training."""
    cpu_s: Estimate | None
    """CPU time per step of all ranks that train; separate servers are not included."""
    gpu_busy: Estimate | None
    """Share of the time in which the GPUs of its ranks ran a kernel, on average; None without NVML."""
    gpu_power_w: Estimate | None
    """Power of the GPUs of its ranks together."""
    gpu_j_per_sample: Estimate | None
    """Energy of these GPUs per training sample."""
    checkpoint_share: Estimate | None
    """Share of the run's time that writing checkpoints costs; None without checkpoints."""
    workers: int | None
    batch: int | None
    ranks: list[RankRow]
    accuracy_gain: Estimate | None
    """Test accuracy minus that of the reference, paired by seed, from 3 seeds or more. The interval is corrected for
    the number of candidates."""
    rank_step_spread: float | None
    """Relative difference of the ranks' median step times, if larger than a synchronous run explains."""
    staleness: Estimate | None
    """Mean staleness of gradients at the server, in updates; None if ranks step together."""
    over_limit_share: Estimate | None
    """Share of gradients above the staleness limit, which were damped or dropped."""
    noise_scale: Estimate | None
    """Gradient noise scale over the last half of a run, in samples; None if it was not measured."""
    failure: str | None
    """Error that stopped the candidate; its other values cover the time before. None if it did not fail."""
    exclusion: Exclusion | None
    """Reason why it cannot be recommended although it was measured; None if it can."""
    is_stopped_by_divergence: bool
    """Whether that error is the divergence of its loss."""
    diverged: list[DivergedRun]
    """Runs that have diverged. Losses and accuracies leave them out."""
    skipped_steps: int | None
    """Steps without an update because gradients were not finite, over all repeats; None if there are none."""

    @property
    def exposed(self) -> Estimate | None:
        """Share of the step in which ranks communicate without computing; None for bounds and baselines."""
        return self.split.exposed if self.split is not None and self.candidate.role == "candidate" else None

    @property
    def is_measured(self) -> bool:
        """Whether it has a step time and did not fail."""
        return self.step_s is not None and self.failure is None


@dataclass(frozen=True)
class Alternative:
    """Candidate that was faster than the recommended one, but does not compute the same as one process."""

    row: CandidateRow
    instead_of: str
    """Recommended candidate."""
    speed_up: Estimate
    """Samples per second ÷ those of the recommended candidate, paired by repeat, with an interval widened for the
    number of interim analyses."""
    level: float
    """Confidence level of that interval."""
    accuracy_gain: Estimate | None
    """Test accuracy minus that of the recommended candidate, paired by seed, from 3 seeds or more."""

    def to_dict(self) -> dict[str, Any]:
        """Return the alternative as JSON values."""
        price = self.accuracy_gain
        return {
            "candidate": self.row.candidate.name,
            "reason": self.row.exclusion,
            "instead_of": self.instead_of,
            "speed_up": self.speed_up.to_dict(),
            "level": self.level,
            "accuracy_gain": None if price is None else price.to_dict(),
        }


@dataclass(frozen=True)
class Proof:
    """Parity proof of one candidate."""

    candidate: str
    error: float
    tolerance: float
    lossless: bool
    ranks: int
    steps: int
    parameters_hold: bool = True
    """Whether the gradient of each parameter is equal up to rounding, too."""

    def to_dict(self) -> dict[str, Any]:
        """Return the proof as JSON values, with None for an infinite error."""
        found: dict[str, Any] = json_safe(asdict(self) | {"holds": self.holds})
        return found

    @property
    def holds(self) -> bool:
        """Whether the gradients are equal up to rounding."""
        return self.error < self.tolerance and self.parameters_hold


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison."""

    record_set: RecordSet
    reference: str | None
    """Candidate that ratios and accuracies are relative to: the requested one, if it was measured."""
    costs: CostTable
    """Time per sample of every run."""
    rows: list[CandidateRow]
    """Fastest first; failed candidates last."""
    decision: Decision
    """Decision between the two fastest that compute the same as one process; if none does, between the others."""
    proofs: list[Proof]
    loss_differences: list[LossDifference]
    superlinear: list[SuperlinearGain]
    """Speed-ups over one process that exceed the number of ranks."""
    warnings: list[str]
    interrupted: bool

    @cached_property
    def wires(self) -> dict[str, Wire]:
        """Traffic of each candidate's run of median speed, computed on first access."""
        found = {row.candidate.name: _wire(self.record_set, row.candidate.name) for row in self.rows}
        return {name: wire for name, wire in found.items() if wire is not None}

    @cached_property
    def payloads(self) -> dict[str, Payload]:
        """Socket byte counts of each candidate's run that deviates most from the expectation."""
        found = {row.candidate.name: _payload(self.record_set, row.candidate.name) for row in self.rows}
        return {name: payload for name, payload in found.items() if payload is not None}

    @property
    def examination(self) -> Examination | None:
        """Examination of the machine; None if there was none."""
        return self.record_set.examination

    def row(self, name: str) -> CandidateRow:
        """Return a candidate's row."""
        return next(row for row in self.rows if row.candidate.name == name)

    def speed_up(self, name: str, over: str, level: float = LEVEL) -> Estimate | None:
        """Return a candidate's samples per second ÷ those of another, paired by repeat."""
        return self.costs.ratio(over, name, level)

    def over_one_process(self) -> tuple[CandidateRow, Estimate] | None:
        """Return the baseline of the fastest candidate and the candidate's speed-up over it.

        None if no baseline was measured together with it: a baseline from another machine or time is not comparable.
        """
        if self.decision.first is None:
            return None
        baselines = [row.candidate for row in self.with_role("baseline")]
        baseline = _measured_with(self.row(self.decision.first).candidate, baselines, self.costs)
        gain = None if baseline is None else self.speed_up(self.decision.first, baseline.name)
        return None if baseline is None or gain is None else (self.row(baseline.name), gain)

    @property
    def gain_in_doubt(self) -> bool:
        """Whether the fastest candidate's speed-up over one process is more than its ranks and caches explain."""
        return any(gain.is_in_doubt and gain.candidate == self.decision.first for gain in self.superlinear)

    @property
    def computes_same(self) -> bool:
        """Whether the fastest candidate of the decision computes the same as one process."""
        return self.decision.first is not None and self.row(self.decision.first).exclusion is None

    @property
    def pick(self) -> str | None:
        """Recommended candidate: the baseline if it is faster beyond doubt, else the winner; None if undecided.

        A candidate that does not compute the same as one process is never recommended: without another one, it is the
        baseline, where that was measured. Nor is the fastest of several settings if another one learns better: that is
        no question of speed alone.
        """
        if self.better_learned is not None:
            return None
        baseline = self.over_one_process()
        if baseline is not None and (not self.computes_same or (baseline[1].high is not None and baseline[1].high < 1)):
            return baseline[0].candidate.name
        return self.decision.first if self.decision.outcome == "winner" and self.computes_same else None

    @cached_property
    def learning(self) -> Learning | None:
        """Candidate with the best test result, where settings differ between candidates that compute the same."""
        if self.decision.first is None or not self.computes_same:
            return None
        same = [row.candidate for row in self.with_role("candidate") if row.exclusion is None]
        return learning_of(self.record_set, same, self.decision.first)

    @property
    def better_learned(self) -> Learning | None:
        """Candidate that has clearly learned better than the fastest one; None if there is none."""
        found = self.learning
        return None if found is None or not found.is_clear or found.best == self.decision.first else found

    @property
    def alternatives(self) -> list[Alternative]:
        """Candidates that were faster than the recommended one and do not compute the same, fastest first."""
        best = self.pick or (self.decision.first if self.computes_same else None)
        return [] if best is None else self.alternatives_to(best)

    def alternatives_to(self, best: str) -> list[Alternative]:
        """Return the candidates that were faster than one of them and do not compute the same, fastest first."""
        others = [row for row in self.with_role("candidate") if row.exclusion in ALTERNATIVES]
        level = 1 - ERROR_RATE / _interim_analyses(self.record_set)
        gains = [(row, self.speed_up(row.candidate.name, best, level)) for row in others]
        return [
            Alternative(row, best, gain, level, accuracy_gain(self.record_set, row.candidate.name, best))
            for row, gain in gains
            if gain is not None and gain.value > 1
        ]

    @property
    def is_clear(self) -> bool:
        """Whether more repeats are not needed to say which is faster."""
        if self.decision.outcome == "single_candidate" and self.alternatives:
            return not self.alternatives[0].speed_up.spans(1)
        return self.decision.outcome != "undecided"

    def with_role(self, role: str) -> list[CandidateRow]:
        """Return the rows of a role (candidate, bound or baseline) that were measured and did not fail."""
        return [row for row in self.rows if row.candidate.role == role and row.is_measured]


def compare(record_set: RecordSet) -> Comparison:
    """Compare the candidates of a set of records."""
    costs = cost_table(record_set)
    failures = {event.candidate: event for event in events_of(record_set.events, FailureEvent)}
    reference = _reference(record_set, costs, failures)
    excluded = exclusions(record_set)
    rows = [
        _row(record_set, candidate, costs, reference, failures.get(candidate.name), excluded.get(candidate.name))
        for candidate in record_set.candidates
    ]
    slowest = float("inf")
    rows.sort(key=lambda row: (row.failure is not None, median_time(costs[row.candidate.name].values() or [slowest])))
    measured = {row.candidate.name for row in rows if row.is_measured and row.candidate.role == "candidate"}
    exact = [c for c in record_set.candidates if c.name in measured and c.name not in excluded]
    spreads = {row.candidate.name: row.rank_step_spread for row in rows}
    superlinear = list(superlinear_gains(record_set, costs, _over_baselines(rows, costs)))
    return Comparison(
        record_set=record_set,
        reference=reference,
        costs=costs,
        rows=rows,
        decision=decide(exact or record_set.candidates, costs, _interim_analyses(record_set), failures.keys()),
        proofs=[_proof(event) for event in events_of(record_set.events, ParityEvent)],
        loss_differences=loss_differences(record_set, reference),
        superlinear=superlinear,
        warnings=[
            *_notes_on_ratios(record_set, costs, rows, reference, failures),
            *(superlinear_notes(superlinear, record_set) if record_set.compares_times else ()),
            *caveats(record_set, spreads),
        ],
        interrupted=bool(events_of(record_set.events, InterruptedEvent)),
    )


def _interim_analyses(record_set: RecordSet) -> int:
    """Return how often the experiment may have checked for a winner."""
    return max((design.interim_analyses for design in record_set.designs), default=1)


def _wire(record_set: RecordSet, name: str) -> Wire | None:
    measured = sorted(
        (cost, number)
        for number, recorded in enumerate(record_set.recorded_runs_of(name))
        if (cost := cost_of(recorded.run))
    )
    if not measured:
        return None
    run = record_set.recorded_runs_of(name)[measured[(len(measured) - 1) // 2][1]].run
    if not run.lockstep:  # Steps of the same number did not run at the same time on all ranks.
        return None
    return wire_of(run.timelines, run.topology.gradient_bytes, without=profiled_steps(windows_of_attempt(run)))


def _payload(record_set: RecordSet, name: str) -> Payload | None:
    counted = [payload for run in record_set.runs_of(name).values() if (payload := payload_of(run)) is not None]
    return max(counted, key=lambda payload: payload.deviation or 0.0, default=None)


def _reference(record_set: RecordSet, costs: CostTable, failed: Collection[str]) -> str | None:
    """Return the requested reference; if it was not measured, the first measured candidate, else any measured."""
    measured = [c for c in record_set.candidates if costs[c.name] and c.name not in failed]
    names = [candidate.name for candidate in measured]
    if not names or record_set.reference in names:
        return record_set.reference
    return next((candidate.name for candidate in measured if candidate.role == "candidate"), names[0])


def _notes_on_ratios(
    record_set: RecordSet,
    costs: CostTable,
    rows: Sequence[CandidateRow],
    reference: str | None,
    failed: Collection[str],
) -> Iterable[str]:
    """Yield notes on the reference of ratios, and on ratios that contradict the times beside them."""
    if not record_set.compares_times:
        return
    if record_set.reference is not None and reference != record_set.reference:
        reason = "failed" if record_set.reference in failed else "was not measured"
        yield f"{record_set.reference} {reason}, so ratios are relative to {reference}."
    yield from costs.contradictions((row.candidate.name, reference) for row in rows if row.is_measured and reference)


def _over_baselines(rows: Sequence[CandidateRow], costs: CostTable) -> Iterable[tuple[str, int, str]]:
    """Yield each candidate with its number of ranks, and the baseline that was measured together with it."""
    baselines = [row.candidate for row in rows if row.candidate.role == "baseline" and row.is_measured]
    for row in (row for row in rows if row.candidate.role == "candidate" and row.is_measured):
        baseline = _measured_with(row.candidate, baselines, costs)
        if baseline is not None and row.workers is not None:
            yield row.candidate.name, row.workers, baseline.name


def _measured_with(candidate: Candidate, others: Sequence[Candidate], costs: CostTable) -> Candidate | None:
    """Return the first of `others` with the same settings and at least one common timing key; None if there is none."""
    with_same_settings = (other for other in others if other.settings == candidate.settings)
    return next(
        (other for other in with_same_settings if costs[candidate.name].keys() & costs[other.name].keys()), None
    )


def _row(
    record_set: RecordSet,
    candidate: Candidate,
    costs: CostTable,
    reference: str | None,
    failure: FailureEvent | None,
    exclusion: Exclusion | None,
) -> CandidateRow:
    recorded_runs = record_set.recorded_runs_of(candidate.name)
    runs = [recorded.run for recorded in recorded_runs]
    own_costs, prior = costs[candidate.name], costs.level_prior(candidate.name)
    times = [step_time(windows_of(recorded.run)) for recorded in recorded_runs if recorded.timing_key in own_costs]
    ranks = rank_rows(runs)
    summaries = [run.summary for run in runs if run.summary]
    counted = converging_runs(record_set, candidate.name).values()
    converging = [run.summary for run in counted if run.summary]
    tests = [summary.test for summary in converging if summary.test]
    tested = [run for run in counted if is_tested_in_training(run)]
    bests = [run.summary.best for run in tested if run.summary and run.summary.best]
    staleness = [summary.staleness for summary in summaries if summary.staleness]
    sent = [size for summary in summaries if summary.traffic for size in summary.traffic.sent_bytes]
    first = next(iter(runs), None)
    return CandidateRow(
        candidate=candidate,
        repeats=len(own_costs),
        step_s=estimate_times([time for time in times if time is not None], prior=prior),
        samples_per_s=estimate_times([1 / cost for cost in own_costs.values()], prior=prior),
        ratio=None if reference is None else costs.ratio(candidate.name, reference),
        split=candidate_split(runs) if own_costs else None,  # Without a step time there are no shares of it.
        above_bound=_above_bound(candidate, record_set.candidates, costs),
        busiest_sent_bytes=max(sent, default=None),
        imbalance=imbalance(ranks),
        train_loss=estimate_losses(_known(summary.average_loss for summary in converging)),
        test_loss=estimate_losses(_known(test.loss for test in tests)),
        test_accuracy=estimate_shares(_known(test.accuracy for test in tests)),
        best_accuracy=estimate_shares(_known(best.accuracy for best in bests)),
        best_step=statistics.median([best.step for best in bests]) if bests else None,
        peak_bytes=max([rank.peak_bytes for rank in ranks if rank.peak_bytes is not None], default=None),
        cpu_s=estimate_times(_known(map(_cpu_s, summaries))),
        gpu_busy=estimate_levels(_known(map(gpu_busy, summaries))),
        gpu_power_w=estimate_levels(_known(map(gpu_power_w, summaries))),
        gpu_j_per_sample=estimate_times(_known(map(gpu_j_per_sample, summaries))),
        checkpoint_share=estimate_shares([cost.share for cost in map(checkpoint_cost, runs) if cost]),
        workers=first.topology.workers if first else None,
        batch=first.topology.batch if first else None,
        ranks=ranks,
        accuracy_gain=accuracy_gain(record_set, candidate.name, reference),
        rank_step_spread=rank_step_spread(ranks) if first and first.topology.exchanges and first.lockstep else None,
        staleness=estimate_levels(_known(found.mean for found in staleness)),
        over_limit_share=estimate_shares(_known(map(_over_limit_share, staleness))),
        noise_scale=estimate_times([found.value for run in counted if (found := noise_scale(run))]),
        failure=None if failure is None else failure.message,
        is_stopped_by_divergence=failure is not None and failure.kind == DivergenceError.__name__,
        diverged=diverged_runs(runs),
        skipped_steps=sum(summary.skipped_steps for summary in summaries) or None,
        exclusion=exclusion,
    )


def is_tested_in_training(run: RunRecord) -> bool:
    """Return whether a run was tested before its end, too."""
    return len({event.step for event in run.events_of(EvaluationEvent)}) > 1


def _cpu_s(summary: Summary) -> float | None:
    """Return the CPU time per step of the ranks that train: time per step × the cores that they keep busy.

    A summary has no ranks that only serve.
    """
    shares = _known(rank.cpu_share for rank in summary.ranks)
    return summary.step_s * sum(shares) if summary.step_s and shares and len(shares) == len(summary.ranks) else None


def _above_bound(candidate: Candidate, candidates: Sequence[Candidate], costs: CostTable) -> Estimate | None:
    """Compare with the bound of the same settings that was measured together with it; None for other roles."""
    bound = _measured_with(candidate, [other for other in candidates if other.role == "bound"], costs)
    if candidate.role != "candidate" or bound is None:
        return None
    ratio = costs.ratio(bound.name, candidate.name)
    return None if ratio is None else ratio.complement()


def _over_limit_share(staleness: StalenessSummary) -> float | None:
    return (staleness.damped + staleness.dropped) / staleness.gradients if staleness.gradients else None


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _proof(event: ParityEvent) -> Proof:
    return Proof(
        candidate=event.candidate,
        error=event.relative_error,
        tolerance=event.tolerance,
        lossless=event.lossless,
        ranks=event.ranks,
        steps=event.steps,
        parameters_hold=event.parameters_hold,
    )
