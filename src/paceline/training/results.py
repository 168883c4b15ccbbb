"""Results of a run: evaluation of the agreed weights, and the figures of all ranks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from paceline.analysis.resources import rank_usage
from paceline.analysis.steps.split import split_of
from paceline.analysis.steps.timing import WindowTime, profiled_steps, step_time
from paceline.analysis.summary import summarise_rank
from paceline.config import RunConfig
from paceline.records import RunFolder
from paceline.records.events import EvaluationEvent
from paceline.records.reader import read_steps
from paceline.records.resources import read_resources
from paceline.records.schema import resources_file, steps_file
from paceline.records.summary import EpochEstimate, EvaluationResult, RankSummary, ReplicaEvaluation, Split, Summary
from paceline.records.timeline import read_timeline, timeline_file
from paceline.training.batchnorm import relative_divergence
from paceline.training.clock_sync import measure_drift
from paceline.training.evaluate import evaluate
from paceline.training.sync import Sync
from paceline.training.traffic import planned_traffic
from paceline.workloads.batches import Share, Source, make_source
from paceline.workloads.workload import Workload

LARGEST_TEST_BATCH = 256
SPLIT = "split."
"""Prefix of the time split's names while all figures of a rank are one flat row."""


@dataclass(frozen=True)
class HeldOut:
    """Test data: split among the ranks, and whole for each rank."""

    shared: Source
    whole: Source


def make_held_out(config: RunConfig, workload: Workload, share: Share) -> HeldOut | None:
    """Return the test data, None if nothing is tested. Call it before training, so that errors in it show early."""
    if workload.test is None or not config.evaluate:
        return None
    # Evaluation keeps nothing for backward, so twice a training micro-batch still needs less memory.
    each = min(LARGEST_TEST_BATCH, 2 * config.global_batch(share.workers) // (share.workers * config.accumulate))
    shared = dataclasses.replace(share, micro_batches_per_step=1)
    alone = dataclasses.replace(shared, rank=0, workers=1)
    return HeldOut(
        *[make_source(workload.test, s, batch=each * s.workers, seed=config.seed, train=False) for s in (shared, alone)]
    )


def run_evaluations(config: RunConfig, workload: Workload, sync: Sync, sources: HeldOut) -> EvaluationEvent:
    """Evaluate the agreed weights, split among the ranks, and each rank's replica with `--eval-ranks`."""
    with sync.agreed() as model:
        agreed = evaluate(model, workload, sources.shared, config, sync.comm)
    test = EvaluationResult(
        loss=agreed.loss, accuracy=agreed.accuracy, samples=agreed.samples, available=sources.shared.samples
    )
    by_rank: list[ReplicaEvaluation] = []
    if config.eval_ranks:
        own = evaluate(sync.strategy.model, workload, sources.whole, config, comm=None)
        accuracy = float("nan") if own.accuracy is None else own.accuracy
        replicas = sync.comm.gather(torch.tensor([own.loss, accuracy], dtype=torch.float64))
        values = [_from_floats(["loss", "accuracy"], replica.tolist()) for replica in replicas]
        by_rank = [ReplicaEvaluation(**replica) for replica in values]
    return EvaluationEvent(test=test, test_by_rank=by_rank)


def summarise(strategy: str, sync: Sync, folder: RunFolder, windows: list[WindowTime], peak: int | None) -> Summary:
    """Return the figures of the run, the same on every rank. Each rank reads its own steps, perhaps on another host."""
    steps = read_steps(folder.path / steps_file(sync.rank))
    used = rank_usage(sync.rank, read_resources(folder.path / resources_file(sync.rank)), steps)
    own = msgspec.structs.asdict(summarise_rank(sync.rank, steps, windows, used=used, peak_bytes=peak))
    own |= {f"{SPLIT}{name}": value for name, value in _own_split(folder, sync.rank, windows).items()}
    del own["split"]
    names = list(own)
    values = [float("nan") if own[name] is None else float(own[name]) for name in names]
    gathered = sync.comm.gather(torch.tensor(values, dtype=torch.float64))
    ranks = [_rank_summary(_from_floats(names, everyone.tolist())) for everyone in gathered]
    step_s = step_time(windows)
    trained = sum(window.steps for window in windows)  # Global steps: a single rank may have trained more shares.
    samples = sum(rank.samples for rank in ranks) / (trained or 1)
    return Summary(
        strategy=strategy,
        steps=trained,
        train_s=sum(window.wall_s for window in windows),
        step_s=step_s,
        samples_per_s=samples / step_s if step_s else None,
        average_loss=_weighted([(rank.average_loss, rank.samples) for rank in ranks]),
        train_accuracy=_weighted([(rank.accuracy, rank.samples) for rank in ranks]),
        ranks=ranks,
        servers=sync.comm.servers,
        traffic=planned_traffic(strategy, sync),
        sockets=None if sync.payload is None else sync.payload.result(),
        untracked=sync.untracked(),
        clock=measure_drift(sync.comm),
        buffer_divergence=sync.buffers.divergence(),
        weight_divergence=relative_divergence(list(sync.strategy.model.parameters()), sync.comm),
        **_metrics(sync),
    )


def _metrics(sync: Sync) -> dict[str, Any]:
    """Return the strategy's own figures: the staleness of gradients has its place in a summary, others have none."""
    metrics = dict(sync.strategy.metrics())
    return {"staleness": metrics.pop("staleness", None), "metrics": metrics}


def _own_split(folder: RunFolder, rank: int, windows: list[WindowTime]) -> dict[str, Any]:
    """Return this rank's time split; empty if events were not collected."""
    file = folder.path / timeline_file(rank)
    split = split_of(read_timeline(file), profiled_steps(windows)) if file.is_file() else None
    return {} if split is None else msgspec.structs.asdict(split)


def _rank_summary(rank: dict[str, Any]) -> RankSummary:
    """Build the summary of a rank from its figures, of which some are of its time split."""
    split = {name.removeprefix(SPLIT): rank.pop(name) for name in list(rank) if name.startswith(SPLIT)}
    return RankSummary(**rank, split=Split(**split) if split else None)


def estimate_epochs(config: RunConfig, source: Source, step_s: float | None) -> EpochEstimate | None:
    """Return the estimated time of the configured epochs; None if all of them are trained."""
    per_epoch = source.expected_steps
    if config.steps is None or config.epochs is None or not per_epoch or not step_s:
        return None
    return EpochEstimate(epochs=config.epochs, seconds=step_s * per_epoch * config.epochs)


def _weighted(figures: list[tuple[float | None, int]]) -> float | None:
    """Return the mean over all samples of a figure that each rank has for its own; None if a rank has none."""
    known = [(value, samples) for value, samples in figures if value is not None]
    total = sum(samples for _, samples in known)
    return sum(value * samples for value, samples in known) / total if total and len(known) == len(figures) else None


def _from_floats(names: list[str], values: list[float]) -> dict[str, Any]:
    """Return the figures by name: NaN becomes None, and counts become integers."""
    counts = {"rank", "steps", "samples", "diverged_step", "peak_bytes", "resident_bytes"}
    return {n: None if v != v else int(v) if n in counts else v for n, v in zip(names, values, strict=True)}
