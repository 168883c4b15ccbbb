"""Summary of a run, written to `summary.json` at its end: results per rank and of the whole run."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from paceline.records.value_types import Count, Positive, PositiveCount, Seconds, WholeNumber

MAX_DEPTH = 50
"""Deepest nesting of a strategy's own figures: far deeper than they are, far below the recursion limit."""


class Split(Struct, frozen=True):
    """Time split of a step in seconds, on one rank or on average."""

    step_s: Positive
    compute_s: float
    """Compute without communication."""
    overlapped_s: float
    """Compute and communication at the same time."""
    exposed_s: float
    """Communication without compute."""
    other_s: float
    """Neither: data loading, arithmetic of the strategy, Python."""
    data_s: float
    """Loading the batch without communication; part of `other_s`."""
    descheduled_s: float | None
    """Wall time minus CPU time of the compute phases; None if a GPU computes."""

    @property
    def communication_s(self) -> float:
        """Total time of communication."""
        return self.overlapped_s + self.exposed_s

    @property
    def computing_s(self) -> float:
        """Total time of compute."""
        return self.compute_s + self.overlapped_s

    @property
    def overlap(self) -> float | None:
        """Share of communication that overlapped with compute; None if nothing was sent."""
        return self.overlapped_s / self.communication_s if self.communication_s > 0 else None

    def share(self, part: str) -> float:
        """Return the share of a part of the step, such as `exposed`."""
        return float(getattr(self, f"{part}_s")) / self.step_s


class RankSummary(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Results of one rank in a run. A value is None if nothing was measured."""

    rank: Count
    steps: Count
    samples: Count
    average_loss: float | None
    """Mean loss over all trained samples; None also if a loss is not finite or was not reported. Steps that were
    skipped do not count."""
    diverged_step: Count | None
    """First step whose loss is not finite and that was not skipped; None if there is none."""
    accuracy: float | None
    """Share of the trained samples with correct predictions, at the time of their step."""
    first_step_s: Seconds | None
    step_s: Seconds | None
    """Mean step time after the warm-up; in a run that is too short for that, without the first step."""
    median_step_s: Seconds | None
    data_s: Seconds | None
    forward_s: Seconds | None
    backward_s: Seconds | None
    update_s: Seconds | None
    """The four phases are mean times over the same steps."""
    peak_bytes: Count | None
    """Highest memory use during training."""
    cpu_share: float | None
    """CPU time ÷ wall time during training: 1 means one core fully used."""
    resident_bytes: Count | None
    """Median of the samples of resident memory."""
    split: Split | None = None
    """Time split of the mean step; None if events were not collected."""
    skipped_samples: Count = 0
    """Samples of steps that were skipped; average loss and accuracy leave them out."""
    gpu: str | None = None
    """Identity of its GPU, which ranks that share it have in common; None on a CPU and in records of older versions."""
    gpu_busy: float | None = None
    """Mean share of the time in which its GPU ran a kernel, of any process. This and the power need NVML."""
    gpu_power_w: float | None = None
    """Mean power of its GPU while it trained, whatever processes used it."""


class PairTraffic(Struct, frozen=True):
    """Total bytes sent from one rank to another in a step."""

    source: Count
    target: Count
    payload_bytes: Count
    """Bytes of tensors."""
    framing_bytes: Count
    """Bytes that Gloo adds for these tensors, and for those sent in the other direction."""


class PlannedTraffic(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Planned traffic of one step."""

    sent_bytes: list[Count]
    """Bytes that each rank sends."""
    received_bytes: list[Count]
    operations: Count
    algorithms: list[str]
    """Algorithms of the operations on gradients, such as `ring`."""
    buffer_bytes: Count
    """BatchNorm buffers that are broadcast."""
    links: list[PairTraffic] | None = None
    """Bytes of each pair of ranks; None if parameters may be unused, or if ranks do not step together."""


class SocketLink(Struct, frozen=True, kw_only=True):
    """Bytes that the kernel counted from one rank to another, over all counted steps."""

    source: Count
    target: Count
    sent_bytes: Count = 0
    """By the source's count."""
    received_bytes: Count = 0
    """By the target's count."""
    retransmitted_bytes: Count = 0


class InterfaceTraffic(Struct, frozen=True, kw_only=True):
    """Bytes on the network interface of a host, over all counted steps."""

    name: str
    ranks: list[Count]
    """Ranks of the host."""
    sent_bytes: Count
    received_bytes: Count


class SocketTraffic(Struct, frozen=True, kw_only=True):
    """Traffic that the kernel counted."""

    steps: PositiveCount
    """Counted steps."""
    links: list[SocketLink]
    interfaces: list[InterfaceTraffic]


class UntrackedCounts(Struct, frozen=True, kw_only=True):
    """Traffic outside the run's own groups."""

    groups: Count
    """Groups that the strategy created itself."""
    operations: WholeNumber
    """Operations on groups other than the run's, on the rank with most."""


class ClockDrift(Struct, frozen=True, kw_only=True):
    """Drift of the ranks' clocks until the end of the run."""

    measured_at_s: Seconds
    drift_s: list[Seconds]
    """Drift of each rank's clock relative to rank 0's."""


class EvaluationResult(Struct, frozen=True, kw_only=True):
    """Result of the agreed weights on the test data."""

    loss: float | None
    """None if it is not finite."""
    accuracy: float | None
    """None for a workload that does not define it."""
    samples: Count
    """Evaluated samples, each counted once."""
    available: Count | None
    """Samples that the test data has; None if unknown."""


class BestEvaluation(Struct, frozen=True, kw_only=True):
    """Best result of the agreed weights on the test data, while training or at its end."""

    step: Count
    """Steps done; the first such step, if several have the same result."""
    epoch: Count | None
    """Epoch of the last step."""
    loss: float | None
    accuracy: float | None


class ReplicaEvaluation(Struct, frozen=True, kw_only=True):
    """Result of one rank's replica on the test data."""

    loss: float | None
    accuracy: float | None


class EpochEstimate(Struct, frozen=True, kw_only=True):
    """Estimated time of the epochs that were not trained in full."""

    epochs: PositiveCount
    seconds: Positive


class StalenessSummary(Struct, frozen=True, kw_only=True):
    """Staleness of gradients in updates, when an asynchronous server applied them."""

    gradients: Count
    mean: float | None
    median: Count | None
    max: Count | None
    max_allowed: Count | None
    """Value of the option `max_staleness`; None without a bound."""
    damped: Count
    dropped: Count
    counts: list[tuple[Count, Count]]
    """Pairs of a staleness and the number of gradients with it."""


class ReplicaDifference(Struct, frozen=True, kw_only=True):
    """Difference between the replicas of a model, as the replica guard has found it."""

    step: Count
    """Steps done when it was found."""
    last_equal_step: Count | None
    """Last step after which the same tensor was equal on all ranks; None if no comparison found it equal."""
    tensor: str
    """Name of the tensor that differs most, relative to its norm."""
    tensors: PositiveCount
    """Number of tensors that differ."""
    ranks: list[Count]
    """Ranks whose tensor differs from that of most ranks; all ranks if no value is that of most."""
    distance: float | None
    """Largest distance, relative to the norm of the tensor; None if it is not finite."""
    by_rounding: bool
    """Whether it is so small that only another order of summation or another processor explains it."""


class ReplicaComparisons(Struct, frozen=True, kw_only=True):
    """Comparisons of the weights of all ranks by the replica guard, until the end of training."""

    mode: str
    """`stop` or `warn`."""
    checks: Count
    """Number of comparisons."""
    seconds: float
    """Time of all comparisons: of checksums on the slowest rank, and of exchanges on the rank that comes last. The
    times of windows do not contain it."""
    share: float | None
    """That time ÷ the training time; None if no step was timed."""
    difference: ReplicaDifference | None = None
    """Largest difference that was found; None if the replicas were equal."""


class Divergence(Struct, frozen=True, kw_only=True):
    """Divergence of a run: its loss is not finite, or has grown and stays large, or too many steps were skipped.

    `analysis/divergence.py` has the criteria.
    """

    step: Count
    """First step, from 0, whose loss is not finite, from which on it is too large, or from which on all are skipped."""
    loss: float | None
    """Loss of that step; None if it is not finite."""
    before: float | None
    """Last finite loss before it; if the loss has grown, the largest of the first steps. None if there is none."""
    skipped: Count = 0
    """Steps in a row that were skipped because gradients were not finite, if they are the reason; otherwise 0."""


class Summary(Struct, frozen=True, kw_only=True):
    """Results of a run. A value is None if nothing was measured."""

    strategy: str
    steps: Count
    """Steps trained."""
    train_s: Seconds | None
    """Total wall time of the windows; None for a run that did not complete."""
    step_s: Seconds | None
    """Median over the windows but the first."""
    samples_per_s: float | None
    average_loss: float | None
    train_accuracy: float | None
    ranks: list[RankSummary]
    servers: Count
    traffic: PlannedTraffic | None
    """None for a strategy without a plan."""
    sockets: SocketTraffic | None
    """None if it could not be counted."""
    untracked: UntrackedCounts | None
    """None without events."""
    clock: ClockDrift | None
    buffer_divergence: float | None
    """Largest distance of any rank's buffers from rank 0's, relative to their norm."""
    weight_divergence: float | None
    skipped_steps: Count = 0
    """Steps without an update, because a gradient was not finite (`--precision fp16` or `--on-nan skip`); on the rank
    with most."""
    divergence: Divergence | None = None
    """None if the run has not diverged."""
    replicas: ReplicaComparisons | None = None
    """Comparisons of the replicas while training; None without a replica guard."""
    staleness: StalenessSummary | None = None
    """None for strategies that step together."""
    metrics: dict[str, Any] = {}
    """Other figures that the strategy reports of itself; their names and types are its own."""
    estimate: EpochEstimate | None = None
    dropped_per_epoch: Count | None = None
    """Samples per epoch that are not trained, because the last batch has fewer samples than ranks."""
    test: EvaluationResult | None = None
    """Result at the end; None before the evaluation, and if nothing was tested."""
    best: BestEvaluation | None = None
    """Evaluation with the highest accuracy, or the lowest loss where no accuracy is defined; None if nothing was
    tested."""
    test_by_rank: list[ReplicaEvaluation] = []
    """Results of each rank's replica, with `--eval-ranks`."""


def check_summary(summary: Summary) -> None:
    """Raise `ValueError` for values that fit one by one and contradict each other."""
    ranks = len(summary.ranks) + summary.servers
    planned = [(link.source, link.target) for link in (summary.traffic and summary.traffic.links) or []]
    counted = [(link.source, link.target) for link in (summary.sockets and summary.sockets.links) or []]
    for place, pairs in (("traffic", planned), ("sockets", counted)):
        for number, pair in enumerate(pairs):
            if max(pair) >= ranks:
                raise ValueError(f"summary.{place}.links[{number}] names a rank that the run did not have")
    if summary.clock is not None:
        _check_clock(summary.clock)
    _check_depth(summary.metrics)


def _check_clock(clock: ClockDrift) -> None:
    if clock.measured_at_s < 0:
        raise ValueError("summary.clock.measured_at_s is not a time, 0 or more")
    for rank, drift_s in enumerate(clock.drift_s):
        if drift_s and abs(drift_s) >= clock.measured_at_s > 0:
            raise ValueError(f"summary.clock.drift_s[{rank}] is not below the elapsed time")


def _check_depth(metrics: dict[str, Any]) -> None:
    level: list[Any] = [metrics]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, list | dict)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ValueError("summary.metrics is nested too deeply")
