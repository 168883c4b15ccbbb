"""The end of a run: testing what it would ship, and the figures of all ranks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from paceline.analysis.resources import rank_usage
from paceline.analysis.steps.split import split_of
from paceline.analysis.steps.timing import WindowTime, profiled_steps, step_time
from paceline.analysis.summary import summarise_rank
from paceline.config import RunConfig
from paceline.records import RunFolder
from paceline.records.reader import read_steps
from paceline.records.resources import read_resources
from paceline.records.schema import resources_file, steps_file
from paceline.records.timeline import read_timeline, timeline_file
from paceline.training.batchnorm import spread
from paceline.training.clock_sync import drift
from paceline.training.evaluate import evaluate
from paceline.training.sync import Sync
from paceline.training.traffic import planned_traffic
from paceline.workloads.batches import Share, Source, make_source
from paceline.workloads.workload import Workload

LARGEST_TEST_BATCH = 256
SPLIT = "split."
"""Before the names of the split's parts, while all figures of a rank stand in one row."""


@dataclass(frozen=True)
class HeldOut:
    """The test data, as ranks share it and as each goes through all of it."""

    shared: Source
    whole: Source


def held_out(config: RunConfig, workload: Workload, share: Share) -> HeldOut | None:
    """The test data; None where there is nothing to test. Made before training, so that a mistake in it shows then."""
    if workload.test is None or not config.evaluate:
        return None
    # Twice a training micro-batch needs less memory than training it, since nothing is kept for backward.
    each = min(LARGEST_TEST_BATCH, 2 * config.global_batch(share.workers) // (share.workers * config.accumulate))
    shared = dataclasses.replace(share, micro_batches=1)
    alone = dataclasses.replace(shared, rank=0, workers=1)
    return HeldOut(
        *[make_source(workload.test, s, batch=each * s.workers, seed=config.seed, train=False) for s in (shared, alone)]
    )


def evaluations(config: RunConfig, workload: Workload, sync: Sync, sources: HeldOut) -> dict[str, Any]:
    """Tests the agreed weights, shared among the ranks, and every rank's own replica where asked for."""
    with sync.agreed() as model:
        agreed = evaluate(model, workload, sources.shared, config, sync.comm).to_dict()
    tests: dict[str, Any] = {"test": agreed | {"available": sources.shared.samples}}
    if config.eval_ranks:
        own = evaluate(sync.strategy.model, workload, sources.whole, config, comm=None)
        accuracy = float("nan") if own.accuracy is None else own.accuracy
        replicas = sync.comm.gather(torch.tensor([own.loss, accuracy], dtype=torch.float64))
        tests["test_by_rank"] = [_from_floats(["loss", "accuracy"], replica.tolist()) for replica in replicas]
    return tests


def summarise(
    strategy: str, sync: Sync, folder: RunFolder, windows: list[WindowTime], peak: int | None
) -> dict[str, Any]:
    """The figures of the run, the same on every rank: each sums up its own steps, which may be on another host."""
    steps = read_steps(folder.path / steps_file(sync.rank))
    used = rank_usage(sync.rank, read_resources(folder.path / resources_file(sync.rank)), steps)
    own = summarise_rank(sync.rank, steps, windows).to_dict() | {
        "peak_bytes": peak,
        "cpu_share": used.cpu_share,
        "resident_bytes": used.resident_bytes,
    }
    own |= {f"{SPLIT}{name}": value for name, value in _own_split(folder, sync.rank, windows).items()}
    names = list(own)
    values = [float("nan") if own[name] is None else float(own[name]) for name in names]
    gathered = sync.comm.gather(torch.tensor(values, dtype=torch.float64))
    ranks = [_nested(_from_floats(names, everyone.tolist())) for everyone in gathered]
    step_s = step_time(windows)
    trained = sum(window.steps for window in windows)  # As all ranks count: one may have trained more of them.
    samples = sum(rank["samples"] for rank in ranks) / (trained or 1)
    return {
        "strategy": strategy,
        "steps": trained,
        "train_s": sum(window.wall_s for window in windows),
        "step_s": step_s,
        "samples_per_s": samples / step_s if step_s else None,
        "average_loss": _weighted([(rank["average_loss"], rank["samples"]) for rank in ranks]),
        "train_accuracy": _weighted([(rank["accuracy"], rank["samples"]) for rank in ranks]),
        "ranks": ranks,
        "servers": sync.comm.servers,
        "traffic": planned_traffic(strategy, sync),
        "sockets": None if sync.payload is None else sync.payload.result(),
        "untracked": sync.untracked(),
        "clock": drift(sync.comm),
        "buffer_divergence": sync.buffers.divergence(),
        "weight_divergence": spread(list(sync.strategy.model.parameters()), sync.comm),
        **sync.strategy.figures(),
    }


def _own_split(folder: RunFolder, rank: int, windows: list[WindowTime]) -> dict[str, Any]:
    """This rank's time split; nothing where events were not collected."""
    file = folder.path / timeline_file(rank)
    split = split_of(read_timeline(file), profiled_steps(windows)) if file.is_file() else None
    return {} if split is None else dataclasses.asdict(split)


def _nested(rank: dict[str, Any]) -> dict[str, Any]:
    """A rank's figures, with those of its split together."""
    split = {name.removeprefix(SPLIT): rank.pop(name) for name in list(rank) if name.startswith(SPLIT)}
    return rank | ({"split": split} if split else {})


def whole_epochs(config: RunConfig, source: Source, step_s: float | None) -> dict[str, Any]:
    """What the steps trained say of whole epochs: how long those asked for would take, what each leaves out."""
    per_epoch = source.expected_steps
    estimate = None
    if config.steps is not None and config.epochs is not None and per_epoch and step_s:
        estimate = {"epochs": config.epochs, "seconds": step_s * per_epoch * config.epochs}
    return {"estimate": estimate, "dropped_per_epoch": source.dropped}


def _weighted(figures: list[tuple[float | None, int]]) -> float | None:
    """The mean over all samples of a figure that each rank has for its own; None if a rank has none."""
    known = [(value, samples) for value, samples in figures if value is not None]
    total = sum(samples for _, samples in known)
    return sum(value * samples for value, samples in known) / total if total and len(known) == len(figures) else None


def _from_floats(names: list[str], values: list[float]) -> dict[str, Any]:
    counts = {"rank", "steps", "samples", "diverged_step", "peak_bytes", "resident_bytes"}
    return {n: None if v != v else int(v) if n in counts else v for n, v in zip(names, values, strict=True)}
