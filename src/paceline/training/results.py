"""Results of a run: evaluation of the agreed weights, and the figures of all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.analysis.steps.timing import WindowTotals
from paceline.comm.control import ControlChannel
from paceline.config import RunConfig
from paceline.strategies.base.abilities import ReportsMetrics
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


def run_evaluations(config: RunConfig, workload: Workload, sync: Sync, sources: HeldOut) -> dict[str, Any]:
    """Evaluate the agreed weights, split among the ranks, and each rank's replica with `--eval-ranks`."""
    with sync.agreed() as model:
        agreed = evaluate(model, workload, sources.shared, config, sync.comm).to_dict()
    tests: dict[str, Any] = {"test": agreed | {"available": sources.shared.samples}}
    if config.eval_ranks:
        own = evaluate(sync.strategy.model, workload, sources.whole, config, comm=None)
        accuracy = float("nan") if own.accuracy is None else own.accuracy
        replicas = sync.comm.control.gather(torch.tensor([own.loss, accuracy], dtype=torch.float64))
        tests["test_by_rank"] = [_from_floats(["loss", "accuracy"], replica.tolist()) for replica in replicas]
    return tests


def summarise(strategy: str, sync: Sync, own: Mapping[str, Any], windows: WindowTotals) -> dict[str, Any]:
    """Return the figures of the run from each rank's own, the same on every rank; called on every rank."""
    ranks = _gather(own, sync.comm.control)
    samples = sum(rank["samples"] for rank in ranks) / (windows.steps or 1)
    step_s = windows.step_s
    return {
        "strategy": strategy,
        "steps": windows.steps,  # Global steps: a single rank may have trained more shares.
        "train_s": windows.wall_s,
        "step_s": step_s,
        "samples_per_s": samples / step_s if step_s else None,
        "average_loss": _weighted([(rank["average_loss"], rank["samples"]) for rank in ranks]),
        "train_accuracy": _weighted([(rank["accuracy"], rank["samples"]) for rank in ranks]),
        "ranks": ranks,
        "servers": sync.comm.servers,
        "traffic": planned_traffic(strategy, sync),
        "sockets": None if sync.payload is None else sync.payload.result(),
        "untracked": sync.untracked(),
        "clock": measure_drift(sync.comm),
        "buffer_divergence": sync.buffers.divergence(),
        "weight_divergence": relative_divergence(list(sync.strategy.model.parameters()), sync.comm),
        **(sync.strategy.metrics() if isinstance(sync.strategy, ReportsMetrics) else {}),
    }


def _gather(own: Mapping[str, Any], control: ControlChannel) -> list[dict[str, Any]]:
    """Return the figures of every rank, on every rank; the names of the time split have a prefix on the way."""
    split = own["split"] or {}
    flat = {name: own[name] for name in own if name != "split"} | {f"{SPLIT}{name}": split[name] for name in split}
    values = [float("nan") if value is None else float(value) for value in flat.values()]
    gathered = control.gather(torch.tensor(values, dtype=torch.float64))
    return [_nested(_from_floats(list(flat), everyone.tolist())) for everyone in gathered]


def _nested(rank: dict[str, Any]) -> dict[str, Any]:
    """Move the figures of a rank's time split into a nested dictionary."""
    split = {name.removeprefix(SPLIT): rank.pop(name) for name in list(rank) if name.startswith(SPLIT)}
    return rank | ({"split": split} if split else {})


def estimate_epochs(config: RunConfig, source: Source, step_s: float | None) -> dict[str, Any]:
    """Return the estimated time of the configured epochs, and the samples that each epoch drops."""
    per_epoch = source.expected_steps
    estimate = None
    if config.steps is not None and config.epochs is not None and per_epoch and step_s:
        estimate = {"epochs": config.epochs, "seconds": step_s * per_epoch * config.epochs}
    return {"estimate": estimate, "dropped_per_epoch": source.dropped}


def _weighted(figures: list[tuple[float | None, int]]) -> float | None:
    """Return the mean over all samples of a figure that each rank has for its own; None if a rank has none."""
    known = [(value, samples) for value, samples in figures if value is not None]
    total = sum(samples for _, samples in known)
    return sum(value * samples for value, samples in known) / total if total and len(known) == len(figures) else None


def _from_floats(names: list[str], values: list[float]) -> dict[str, Any]:
    """Return the figures by name: NaN becomes None, and counts become integers."""
    counts = {"rank", "steps", "samples", "diverged_step", "peak_bytes", "resident_bytes"}
    return {n: None if v != v else int(v) if n in counts else v for n, v in zip(names, values, strict=True)}
