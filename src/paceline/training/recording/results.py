"""Results of a run: the figures of all ranks."""

from __future__ import annotations

from typing import Any

from paceline.comm.messages.json_messages import gather_typed
from paceline.config import RunConfig
from paceline.records.summary import (
    EpochEstimate,
    RankSummary,
    StalenessSummary,
    Summary,
)
from paceline.strategies.base.abilities import ReportsMetrics
from paceline.strategies.base.strategy import Strategy
from paceline.training.batchnorm import relative_divergence
from paceline.training.recording.clock_sync import measure_drift
from paceline.training.recording.traffic import planned_traffic
from paceline.training.recording.windows import Windows
from paceline.training.sync import Sync
from paceline.workloads.batches import Source


def summarise(strategy: str, sync: Sync, own: RankSummary, windows: Windows) -> Summary:
    """Return the figures of the run from each rank's own, the same on every rank; called on every rank."""
    ranks = gather_typed(own, RankSummary, sync.comm.control)
    totals = windows.totals
    samples = sum(rank.samples for rank in ranks) / (totals.steps - windows.first_step or 1)
    average_loss, accuracy = _over_ranks(ranks)
    if windows.first_step:  # Ranks know only the steps since the run resumed.
        average_loss, accuracy = windows.trained.average_loss, windows.trained.accuracy
    step_s = totals.step_s
    return Summary(
        strategy=strategy,
        steps=totals.steps,  # Global steps: a single rank may have trained more shares.
        train_s=totals.wall_s,
        step_s=step_s,
        samples_per_s=samples / step_s if step_s else None,
        average_loss=average_loss,
        train_accuracy=accuracy,
        ranks=ranks,
        servers=sync.comm.servers,
        traffic=planned_traffic(strategy, sync),
        sockets=None if sync.payload is None else sync.payload.result(),
        untracked=sync.untracked(),
        clock=measure_drift(sync.comm),
        buffer_divergence=sync.buffers.divergence(),
        weight_divergence=relative_divergence(list(sync.strategy.model.parameters()), sync.comm),
        skipped_steps=int(sync.comm.control.largest(sync.skipped_steps)),
        divergence=windows.divergence.found,
        replicas=None if sync.guard is None else sync.guard.result(totals.wall_s),
        **_metrics(sync.strategy),
    )


def _metrics(strategy: Strategy) -> dict[str, Any]:
    """Return the strategy's own figures: the staleness of gradients has its place in a summary, others have none."""
    metrics = dict(strategy.metrics()) if isinstance(strategy, ReportsMetrics) else {}
    has_staleness = isinstance(metrics.get("staleness"), StalenessSummary)
    return {"staleness": metrics.pop("staleness") if has_staleness else None, "metrics": metrics}


def estimate_epochs(config: RunConfig, source: Source, step_s: float | None) -> EpochEstimate | None:
    """Return the estimated time of the configured epochs; None if all of them are trained."""
    per_epoch = source.expected_steps
    if config.steps is None or config.epochs is None or not per_epoch or not step_s:
        return None
    return EpochEstimate(epochs=config.epochs, seconds=step_s * per_epoch * config.epochs)


def _over_ranks(ranks: list[RankSummary]) -> tuple[float | None, float | None]:
    """Return the average loss and the accuracy over the samples of all ranks."""
    trained = [rank.samples - rank.skipped_samples for rank in ranks]
    losses = _weighted([(rank.average_loss, samples) for rank, samples in zip(ranks, trained, strict=True)])
    return losses, _weighted([(rank.accuracy, samples) for rank, samples in zip(ranks, trained, strict=True)])


def _weighted(figures: list[tuple[float | None, int]]) -> float | None:
    """Return the mean over all samples of a figure that each rank has for its own; None if a rank has none."""
    known = [(value, samples) for value, samples in figures if value is not None]
    total = sum(samples for _, samples in known)
    return sum(value * samples for value, samples in known) / total if total and len(known) == len(figures) else None
