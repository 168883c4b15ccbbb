"""The proof of parity as a task of its own: what `compare` has its ranks do before they measure anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from paceline.comm import World, close_comm
from paceline.config import Precision, RunConfig
from paceline.records import RunFolder
from paceline.strategies.base import Role
from paceline.strategies.registry import create
from paceline.training.check import check_gradients
from paceline.training.parity import Gradients, oracle, prove
from paceline.training.stage import Stage, set_stage

SAMPLES_PER_MICRO_BATCH = 8
"""What the proof trains on: the mean of eight samples is as easily wrong as that of a thousand, and sooner known."""
STEPS = 3
"""Reducers rebuild their buckets after the first step."""

_oracles: dict[RunConfig, list[Gradients]] = {}
"""Rank 0's: strategies of one job that train the same shards share the other side of the proof."""


def prove_run(
    config: RunConfig,
    world: World,
    folder: RunFolder,
    *,
    threads: int | None,
    number: int = 0,
    command: str | None = None,  # noqa: ARG001  (every task takes the same)
) -> None:
    """Compares the strategy's gradients with one process's and leaves the error; idle ranks wait."""
    stage = set_stage(small(config, world.size), world, threads)
    if stage is None:
        world.wait_for(f"proof-{number}")
        return
    with exact_kernels():
        check_gradients(stage.model, stage.workload, stage.source(), stage.config, stage.comm.rank)
        expected = _expected(stage) if stage.comm.rank == 0 else None
        parity = prove(stage.strategy, stage.workload, stage.share, stage.config, stage.comm, STEPS, expected)
    close_comm(stage.comm)
    if stage.comm.rank == 0:
        folder.write_parity(parity.to_dict() | {"lossless": stage.strategy.lossless, "steps": STEPS})
        folder.mark_finished()
        world.announce(f"proof-{number}")


@contextmanager
def exact_kernels() -> Iterator[None]:
    """Has a GPU compute in full float32, the same way each time.

    By default convolutions round to TF32 and may take another algorithm from call to call: on an H200 a network then
    differs from itself by 6e-4, which would hide the errors that a proof is after.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic, torch.get_float32_matmul_precision()
    cudnn.allow_tf32, cudnn.deterministic = False, True
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        cudnn.allow_tf32, cudnn.deterministic = before[:2]
        torch.set_float32_matmul_precision(before[2])


def small(config: RunConfig, ranks: int) -> RunConfig:
    """The configuration to prove a run's strategy with: fewer samples a step, and without autocast's rounding."""
    workers = create(config.strategy).roles(ranks).count(Role.WORKER)
    batch = min(config.global_batch(workers), SAMPLES_PER_MICRO_BATCH * workers * config.accumulate)
    # Under `--bn sync` the two sides add up in another order, and where that moves a value over a ReLU's edge a float32
    # gradient jumps by 1e-3; in float64 it does not happen.
    precision: Precision = "fp64" if config.bn == "sync" or config.precision == "fp64" else "fp32"
    return replace(config, precision=precision, batch=batch, batch_per_rank=None)


def _expected(stage: Stage) -> list[Gradients]:
    key = replace(stage.config, strategy=f"on {stage.comm.world_size}")
    if key not in _oracles:
        _oracles[key] = oracle(stage.model, stage.workload, stage.share, stage.config, STEPS)
    return _oracles[key]
