"""One run on one rank, from a configuration to a record."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from paceline.comm import Comm, World, open_comm
from paceline.config import RunConfig
from paceline.measure.cores import usable_cores
from paceline.measure.steps import step_clock
from paceline.records import EventWriter, RunFolder, StepWriter, provenance
from paceline.strategies.base import MakeOptimizer, Role, Strategy
from paceline.strategies.registry import create
from paceline.training import results
from paceline.training.check import check_gradients
from paceline.training.ledger import Ledger
from paceline.training.loop import Loop, Report, silent
from paceline.training.placement import Placement
from paceline.training.precision import storage_dtype
from paceline.training.sync import Sync
from paceline.workloads.batches import Share, make_source
from paceline.workloads.load import load_workload
from paceline.workloads.workload import Workload


def run(
    config: RunConfig,
    world: World,
    folder: RunFolder,
    *,
    threads: int | None,
    number: int = 0,
    listen: Report = silent,
    command: str | None = None,
) -> None:
    """Trains, tests, and leaves a record; idle ranks wait until the others are done.

    `number` tells the runs of one job apart, `command` is what the user typed. `listen` hears, on every rank, what
    rank 0 writes to the record's events.
    """
    strategy = create(config.strategy, allow_unused=config.allow_unused)
    roles = strategy.roles(world.size)
    placement = Placement.choose(config, world, roles, threads)
    active = [rank for rank, role in enumerate(roles) if role is not Role.IDLE]
    placement.apply(config)
    comm = open_comm(active, device=placement.device, backend=placement.backend, timeout_s=config.timeout)
    if comm is None:
        world.wait_for(f"run-{number}")
        return
    _run_as_worker(config, strategy, world, placement, comm, folder, listen, command)
    if comm.rank == 0:
        world.announce(f"run-{number}")


def _run_as_worker(
    config: RunConfig,
    strategy: Strategy,
    world: World,
    placement: Placement,
    comm: Comm,
    folder: RunFolder,
    listen: Report,
    command: str | None,
) -> None:
    batch = config.global_batch(comm.world_size)
    workload = load_workload(config)
    torch.manual_seed(config.seed * 1_000_003 + comm.rank + 1)  # What is random from here on differs between ranks.
    dtype = storage_dtype(config.precision)
    layout = torch.channels_last if config.channels_last else torch.preserve_format
    model = workload.model.to(placement.device, dtype, memory_format=layout)  # type: ignore[call-overload]
    share = Share(comm.rank, comm.world_size, config.accumulate, placement.device, dtype, config.channels_last)
    source = make_source(workload.train, share, batch=batch, seed=config.seed, reshuffle=config.reshuffle)
    if not model.training:  # As a whole; parts that a user keeps in evaluation mode stay so.
        model.train()
    check_gradients(model, workload, source, config, comm.rank)
    held_out = results.held_out(config, workload, share)

    events = EventWriter(folder) if comm.rank == 0 else None

    def report(event: str, **values: Any) -> None:
        if events is not None:
            events.write(event, **values)
        listen(event, **values)

    # Rank 0 describes the run; so does the first rank of a host that does not see rank 0's disk.
    if comm.rank == 0 or (world.local_rank == 0 and not folder.is_described):
        topology = _topology(config, workload, source.batch, world, placement, comm)
        topology["exchanges"] = strategy.exchanges
        folder.write_run(config=dataclasses.asdict(config), topology=topology, provenance=provenance(command))
        report("config", **topology)
    steps = StepWriter(folder, comm.rank)
    sync = Sync(model, _optimizer_factory(config, workload), strategy, comm, config.bn)
    clock = step_clock(placement.device)
    loop = Loop(config, workload, sync, source, clock, Ledger(clock, workload, steps), report)
    try:
        train_s = loop.train()
        summary = results.summarise(config, sync, source, folder, train_s)
        if comm.rank == 0:
            folder.write_summary(summary)  # Already now: a test that fails must not cost the figures of the training.
        if held_out is not None:
            tests = results.evaluations(config, workload, sync, held_out)
            report("evaluation", **tests)
            summary |= tests
        if comm.rank == 0:
            folder.write_summary(summary)
            report("end")
            folder.mark_finished()
    finally:
        steps.close()
        if events:
            events.close()
    sync.close()


def _optimizer_factory(config: RunConfig, workload: Workload) -> MakeOptimizer:
    if workload.optimizer is not None:
        return workload.optimizer
    # Fused: one pass over each parameter instead of four; a third of the time of the default on a CPU.
    return lambda parameters: torch.optim.SGD(
        parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, fused=True
    )


def _topology(
    config: RunConfig, workload: Workload, batch: int | None, world: World, placement: Placement, comm: Comm
) -> dict[str, Any]:
    """What was chosen for the run: printed as its configuration line, kept in its record."""
    each = [] if batch is None else sorted({batch // comm.world_size, -(-batch // comm.world_size)})
    return {
        "workload": workload.name,
        "strategy": config.strategy,
        "world_size": world.size,
        "workers": comm.world_size,
        "ranks_per_host": world.local_size,
        "batch": batch,
        "batch_per_rank": each,
        "device": placement.device_name,
        "backend": placement.backend,
        "interface": world.interface,
        "threads": placement.threads,
        "cores": usable_cores(),
        "parameters": sum(p.numel() for p in workload.model.parameters()),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in workload.model.parameters() if p.requires_grad),
        "own_optimizer": workload.optimizer is not None,
        "lr": config.lr,
        "log_every": config.log_every,
    }
