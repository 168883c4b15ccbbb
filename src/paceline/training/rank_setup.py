"""Set-up of a rank before training or a parity proof: process groups, workload, model, share of the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from torch import nn

from paceline.comm import Comm, World, open_comm
from paceline.config import Precision, RunConfig
from paceline.config.recipe import AUTO_PRECISION
from paceline.errors import UsageError
from paceline.formatting import whole
from paceline.measure.slow_rank import stopwatch_for
from paceline.measure.start_up import START_UP
from paceline.records.precision import PrecisionChoice
from paceline.strategies.base.abilities import ServesParameters
from paceline.strategies.base.strategy import MakeOptimizer, Role, Strategy
from paceline.strategies.registry import create
from paceline.training.compiler_import import OPTIMIZER_FUNCTIONS, exclude_from_compiler
from paceline.training.model_format import move_model
from paceline.training.placement import Placement
from paceline.training.precision import set_matmul_precision, storage_dtype
from paceline.training.precision_choice import agree_on_precision, with_choice
from paceline.workloads.batches import Share, Source, make_source
from paceline.workloads.load import load_workload, seed_imports
from paceline.workloads.random_state import seed_everything
from paceline.workloads.recipes import with_recipe
from paceline.workloads.workload import Workload


@dataclass(frozen=True)
class RankSetup:
    """Everything that a participating rank needs to start a run."""

    config: RunConfig
    world: World
    strategy: Strategy
    placement: Placement
    comm: Comm
    workload: Workload
    share: Share
    given: RunConfig
    """Config as the user gave it, without the values of the recipe; with the number format that `auto` chose."""
    precision_choice: PrecisionChoice | None = None
    """Choice of `--precision auto`; None if the number format was given."""

    @property
    def model(self) -> nn.Module:
        """Model on its device, in training mode."""
        return self.workload.model

    def serve(self, make_optimizer: MakeOptimizer) -> None:
        """Run a server: it keeps parameters until the workers have finished."""
        self.strategy.attach(self.model, make_optimizer, self.comm)
        assert isinstance(self.strategy, ServesParameters)
        self.strategy.serve()
        self.strategy.close()

    def source(self) -> Source:
        """Return this rank's share of the training data, from the beginning."""
        batch = self.config.global_batch(self.comm.world_size)
        seed, reshuffle = self.config.seed, self.config.reshuffle
        return make_source(self.workload.train, self.share, batch=batch, seed=seed, reshuffle=reshuffle)


def set_up_rank(
    config: RunConfig,
    world: World,
    threads: int | None,
    *,
    timed: bool = False,
    choose_precision: Callable[[RunConfig], Precision | None] = attrgetter("precision"),
    precision_file: Path | None = None,
) -> RankSetup | None:
    """Set up a rank, with a stopwatch if `timed`; called on all ranks. Return None on idle ranks.

    `choose_precision` returns the number format to compute in, given the config with all values of the recipe, which is
    known once the workload is loaded. `workload.recipe` keeps the number format of training. If it is `auto`, the
    ranks choose one together; `precision_file` has their choices.
    """
    seed_imports(config)  # A user's strategy may be in the module of the workload, which is imported here.
    strategy = create(config.strategy, allow_unused=config.allow_unused)
    roles = strategy.roles(world.size)
    placement = Placement.choose(config, world, roles, threads)
    placement.apply(config)
    workers, servers = ([n for n, own in enumerate(roles) if own is role] for role in (Role.WORKER, Role.SERVER))
    speed = {"factor": config.slowed.get(world.rank, 1.0), "core_share": placement.core_share}
    comm = open_comm(
        workers,
        servers=servers,
        device=placement.device,
        backend=placement.backend,
        timeout_s=config.timeout_s,
        check_collectives=config.check_collectives,
        stopwatch=stopwatch_for(placement.device, events=config.events, **speed) if timed else None,
    )
    START_UP.end_of("preparing the device")
    if comm is None:
        return None
    config.global_batch(comm.world_size)  # Raises before anything is loaded if a worker would have no samples.
    workload = load_workload(config)
    START_UP.end_of("making the workload")
    exclude_from_compiler(*OPTIMIZER_FUNCTIONS)
    assert workload.recipe is not None, "load_workload() sets the recipe"
    given, config = config, with_recipe(config, workload.recipe)
    config = replace(config, precision=choose_precision(config))
    seed_everything(rank_seed(config.seed, comm.rank))  # Random numbers from here on differ between ranks.
    dtype = storage_dtype(config.precision)
    model = workload.model
    move_model(model, config, placement.device)
    if not model.training:  # Submodules that a user keeps in evaluation mode stay in it.
        model.train()
    choice = None
    if config.precision == AUTO_PRECISION:
        choice = agree_on_precision(config, workload, comm, precision_file)
        given, config = with_choice(given, choice), with_choice(config, choice)
        move_model(model, config, placement.device)
    set_matmul_precision(config.precision, placement.device)
    trains_as = 0 if comm.is_server else comm.rank  # A server trains nothing; any valid rank will do.
    share = Share(trains_as, comm.world_size, config.accumulate, placement.device, dtype, config.channels_last)
    return RankSetup(config, world, strategy, placement, comm, workload, share, given, choice)


def rank_seed(seed: int, rank: int) -> int:
    """Return the seed of a rank's random numbers: different on each rank, the same under every strategy."""
    return seed * 1_000_003 + rank + 1


def check_batch_fits(config: RunConfig, workers: int, samples: int | None) -> None:
    """Raise if the batch that the user wants is larger than the training data; `samples` is None where unknown.

    Without a wish, the batch is reduced to the data.
    """
    wanted = config.global_batch(workers)
    if samples is None or wanted <= samples or (config.batch is None and config.batch_per_rank is None):
        return
    fitting = f"--batch {samples}" if config.batch is not None else f"--batch-per-rank {max(1, samples // workers)}"
    raise UsageError(
        f"a global batch of {whole(wanted)} is more than the {whole(samples)} samples of the training data.",
        hint=f"use {fitting} or less",
    )
