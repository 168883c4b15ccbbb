"""Hand-made models of records, with changes that a test names."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from msgspec.structs import replace

from paceline.config import RunConfig
from paceline.records import Provenance, Summary, Topology
from paceline.records.description import RecordedRecipe
from paceline.records.experiment.design import BatchDesign, CompareDesign, LargeBatchDesign, ScaleDesign, ScaleShape
from paceline.records.settings import Settings
from paceline.records.summary import RankSummary, ReplicaComparisons, ReplicaDifference

PROVENANCE = Provenance(
    time="2026-01-02T03:04:05+0000",
    command="paceline compare --ranks 2",
    host="here",
    system="Linux",
    cpu="a processor",
    cpu_count=2,
    memory_bytes=8_000_000_000,
    python="3.11.0",
    versions={"paceline": "0.1.0", "torch": "2.13.0"},
    commit="0123456789abcdef",
)


def recorded_settings(**changes: Any) -> Settings:
    """Return the settings of a run, as they are recorded."""
    return asdict(RunConfig(**changes))


def recipe(**changes: Any) -> RecordedRecipe:
    """Return a recorded recipe: SGD with a constant learning rate."""
    made = RecordedRecipe(
        optimizer="sgd",
        schedule="constant",
        warmup_epochs=0.0,
        lr=0.1,
        reference_batch=256,
        scale_lr="none",
    )
    return replace(made, **changes)


def topology(workers: int = 2, **changes: Any) -> Topology:
    """Return the topology of a run of `ddp` on one host."""
    made = Topology(
        workload="cnn on digits",
        strategy="ddp",
        lossless=True,
        exchanges=True,
        lockstep=True,
        sends="overlapped",
        world_size=workers,
        workers=workers,
        ranks_per_host=workers,
        batch=16 * workers,
        batch_per_rank=[16],
        device="cpu",
        backend="gloo",
        interface="lo",
        threads=1,
        cores=float(workers),
        parameters=1000,
        gradient_bytes=4000,
        batch_norm_layers=0,
        random_layers=0,
        classes=10,
        user_optimizer=False,
        lr=0.1,
        recipe=recipe(),
        log_every=20,
    )
    return replace(made, **changes)


def rank_summary(rank: int = 0, **changes: Any) -> RankSummary:
    """Return the summary of a rank that trained ten steps."""
    made = RankSummary(
        rank=rank,
        steps=10,
        samples=160,
        average_loss=2.0,
        diverged_step=None,
        accuracy=0.5,
        first_step_s=0.1,
        step_s=0.01,
        median_step_s=0.01,
        data_s=0.001,
        forward_s=0.003,
        backward_s=0.005,
        update_s=0.001,
        peak_bytes=400_000_000 + rank,
        cpu_share=None,
        resident_bytes=None,
    )
    return replace(made, **changes)


def summary(workers: int = 2, **changes: Any) -> Summary:
    """Return the summary of a run of ten steps, without traffic and tests."""
    made = Summary(
        strategy="ddp",
        steps=10,
        train_s=0.19,
        step_s=0.01,
        samples_per_s=3200.0,
        average_loss=2.0,
        train_accuracy=0.5,
        ranks=[rank_summary(rank) for rank in range(workers)],
        servers=0,
        traffic=None,
        sockets=None,
        untracked=None,
        clock=None,
        buffer_divergence=None,
        weight_divergence=None,
    )
    return replace(made, **changes)


def replicas(**changes: Any) -> ReplicaComparisons:
    """Return the comparisons of a run whose replicas differ by rounding on rank 1."""
    difference = ReplicaDifference(
        step=8, last_equal_step=4, tensor="fc.weight", tensors=3, ranks=[1], distance=3.1e-8, by_rounding=True
    )
    made = ReplicaComparisons(mode="stop", checks=6, seconds=0.0019, share=0.0004, difference=difference)
    return replace(made, **changes)


DESIGN: dict[str, Any] = {
    "ranks": 2,
    "hosts": 1,
    "threads": 1,
    "requested_threads": None,
    "repeats": 2,
    "max_repeats": 2,
    "interim_analyses": 1,
    "proof": True,
    "target": "cnn on digits",
    "emulated": None,
    "host_cpus": None,
}
"""Design of an experiment on two ranks of one host."""
POINTS_DESIGN: dict[str, Any] = DESIGN | {
    "reference": "single",
    "shapes": [ScaleShape(hosts=1, ranks_per_host=1), ScaleShape(hosts=1, ranks_per_host=2)],
    "strategies": ["single", "ddp"],
    "requested_ranks_per_host": [],
    "machines": [0],
    "machine_cores": 2.0,
    "ranks_pinned": False,
    "gpus": 0,
}
"""Design of an experiment over points on one host of two cores."""


def compare_design(**changes: Any) -> CompareDesign:
    """Return the design of a comparison on two ranks of one host."""
    return CompareDesign(**DESIGN | {"ranks_per_host": 2, "reference": "ddp", "batch": 32} | changes)


def scale_design(**changes: Any) -> ScaleDesign:
    """Return the design of a scaling experiment on one host of two cores."""
    own = {"batch": 256, "batch_per_rank": 128, "modes": ["strong", "weak"]}
    return ScaleDesign(**POINTS_DESIGN | own | changes)


def batch_design(**changes: Any) -> BatchDesign:
    """Return the design of an experiment over batch sizes on one host of two cores."""
    own = {"batch": None, "sizes": [64, 128], "per_rank": False, "trains": True, "core_flop_per_s": 1e9}
    return BatchDesign(**POINTS_DESIGN | own | changes)


def large_batch_design(**changes: Any) -> LargeBatchDesign:
    """Return the design of an experiment with large batches on two ranks of one host."""
    own = {"reference_batch": 32, "sizes": [320], "epochs": 4, "warmup_epochs": 1.0, "micro_batch": 1024}
    shared = {"ranks_per_host": 2, "reference": "32 reference", "batch": None, "proof": False}
    return LargeBatchDesign(**DESIGN | shared | own | changes)
