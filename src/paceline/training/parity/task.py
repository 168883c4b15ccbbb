"""Parity proof as a task for ranks: `compare` runs it before it measures anything."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from paceline.comm import World, close_comm
from paceline.config import Precision, RunConfig
from paceline.records import RunFolder
from paceline.strategies.base.strategy import Role
from paceline.strategies.registry import create
from paceline.training.checks.data import check_same_data
from paceline.training.checks.model import check_model
from paceline.training.parity.difference import Gradients
from paceline.training.parity.oracle import Shards, oracle
from paceline.training.parity.proof import prove, serve_proof, take_shards
from paceline.training.precision import make_scaler
from paceline.training.rank_setup import RankSetup, set_up_rank
from paceline.training.replicas.checksums import checksums

SAMPLES_PER_MICRO_BATCH = 8
"""A mean over eight samples shows an error as well as one over a thousand, in less time."""
STEPS = 3
"""More than one, since reducers rebuild their buckets after the first step."""

_shards: dict[RunConfig, Shards] = {}
"""Samples, shared by the strategies of a job that train on the same shards."""
_oracles: dict[tuple[RunConfig, tuple[int, ...]], list[Gradients]] = {}
"""Oracle gradients on rank 0, for the same shards and the same weights."""


def prove_run(
    config: RunConfig,
    world: World,
    folder: RunFolder,
    *,
    threads: int | None,
    number: int = 0,
    command: str | None = None,  # noqa: ARG001  (every task takes the same)
) -> None:
    """Compare the strategy's gradients with the oracle's and write the result; idle ranks wait."""
    setup = set_up_rank(proof_config(config, world.size), world, threads, choose_precision=proof_precision)
    if setup is None:
        world.wait_for(f"proof-{number}")
        return
    if setup.comm.is_server:
        with exact_kernels():
            serve_proof(setup.strategy, setup.workload, setup.comm)
        close_comm(setup.comm)
        return
    with exact_kernels():
        source = setup.source()
        check_same_data({"training data": source}, setup.comm.control)
        # On a copy: some models (with the old `spectral_norm`) cannot be copied after a forward pass.
        check_model(copy.deepcopy(setup.model), setup.workload, source, setup.config, setup.comm.rank)
        shards, expected = _shards_and_oracle(setup)
        # A scaler changes only exponents, so the proof shows exactly whether the strategy unscales.
        assert setup.workload.recipe is not None, "load_workload() sets the recipe"
        scaler = make_scaler(setup.workload.recipe.precision, setup.share.device, config.on_nan)
        parity = prove(
            setup.strategy, setup.workload, setup.share, setup.config, setup.comm, STEPS, shards, expected, scaler
        )
    close_comm(setup.comm)
    if setup.comm.rank == 0:
        folder.write_parity(parity)
        folder.mark_finished()
        world.announce(f"proof-{number}")


@contextmanager
def exact_kernels() -> Iterator[None]:
    """Make a GPU compute in full float32 and with deterministic algorithms.

    By default convolutions round to TF32 and may use another algorithm in each call. On an H200 two runs of a network
    then differ by 6e-4, which would hide the errors that a proof looks for.
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


def proof_config(config: RunConfig, ranks: int) -> RunConfig:
    """Return the configuration of a proof: fewer samples per step, and no rank that is slowed down."""
    workers = create(config.strategy).roles(ranks).count(Role.WORKER)
    batch = min(config.global_batch(workers), SAMPLES_PER_MICRO_BATCH * workers * config.accumulate)
    return replace(config, batch=batch, batch_per_rank=None, slow_rank="")


def proof_precision(config: RunConfig) -> Precision:
    """Return the number format of a proof, given the config with its recipe: one without autocast.

    Under `--bn sync` ranks and oracle add in a different order. If that moves a value across 0 before a ReLU, a float32
    gradient changes by 1e-3; in float64 this does not happen.
    """
    return "fp64" if config.bn == "sync" or config.precision == "fp64" else "fp32"


def _shards_and_oracle(setup: RankSetup) -> tuple[Shards, list[Gradients] | None]:
    """Return the shards and, on rank 0, the oracle's gradients; both are computed once per job."""
    workload, share, config, comm = setup.workload, setup.share, setup.config, setup.comm
    # With the same roles the same ranks have drawn these shards, so all of them agree on whether to draw again.
    roles = " ".join(role.name for role in setup.strategy.roles(setup.world.size))
    key = replace(config, strategy=roles)
    if key not in _shards:
        _shards[key] = take_shards(workload, share, config, comm, STEPS)
    shards = _shards[key]
    if comm.rank != 0:
        return shards, None
    # A workload may initialise its weights differently each time it is loaded.
    oracle_key = key, tuple(checksums([*setup.model.parameters(), *setup.model.buffers()]))
    if oracle_key not in _oracles:
        _oracles[oracle_key] = oracle(workload, shards.all_ranks, share, config)
    return shards, _oracles[oracle_key]
