"""One run on one rank, from the configuration to the record."""

from __future__ import annotations

import dataclasses
import os

import msgspec
import torch

from paceline.comm import World, close_comm
from paceline.config import RunConfig
from paceline.config.emulation import emulation_info
from paceline.measure.memory import peak_bytes, reset_peak
from paceline.measure.profiler import StepProfiler
from paceline.measure.run_monitor import RunMonitor
from paceline.records import RunFolder, Topology
from paceline.records.description import RecordedEmulation
from paceline.strategies.base.strategy import MakeOptimizer
from paceline.training import results
from paceline.training.clock_sync import start_clocks
from paceline.training.loop import TrainingLoop
from paceline.training.model_check import check_gradients
from paceline.training.rank_setup import RankSetup, set_up_rank
from paceline.training.run_recorder import RunRecorder, WriteEvent, discard_event
from paceline.training.step_recorder import StepRecorder
from paceline.training.sync import Sync
from paceline.training.tensorboard import TensorBoardWriter
from paceline.training.topology import describe_model, describe_placement, describe_strategy
from paceline.training.windows import Windows
from paceline.workloads.workload import Workload


def run(
    config: RunConfig,
    world: World,
    folder: RunFolder,
    *,
    threads: int | None,
    number: int = 0,
    on_event: WriteEvent = discard_event,
    command: str | None = None,
) -> None:
    """Train, evaluate and write the record. Servers serve, and idle ranks wait, until the workers have finished.

    `number` is the index of the run in its job, `command` the command line of the user. `on_event` is called on every
    rank with each event that rank 0 writes to the record.
    """
    setup = set_up_rank(config, world, threads, timed=True)
    if setup is None:
        world.wait_for(f"run-{number}")
        return
    if setup.comm.is_server:
        setup.serve(optimizer_factory(config, setup.workload))
        close_comm(setup.comm)
        return
    _run_as_worker(setup, folder, on_event, command)
    if setup.comm.rank == 0:
        world.announce(f"run-{number}")


def _run_as_worker(setup: RankSetup, folder: RunFolder, on_event: WriteEvent, command: str | None) -> None:
    config, workload, comm, model = setup.config, setup.workload, setup.comm, setup.model
    peak_is_ours = reset_peak(setup.placement.device)
    source = setup.source()
    check_gradients(model, workload, source, config, comm.rank)
    held_out = results.make_held_out(config, workload, setup.share)

    stopwatch = setup.stopwatch
    start_clocks(comm)
    recorder = RunRecorder(folder, comm.rank, stopwatch.clock.now, on_event)
    # Rank 0 writes the description; so does the first rank of a host that does not share rank 0's disk.
    if comm.rank == 0 or (setup.world.local_rank == 0 and not folder.has_run_file):
        recorder.write_description(dataclasses.asdict(config), _topology(setup, source.batch), command)
    sync = Sync(model, optimizer_factory(config, workload), setup.strategy, comm, config.bn)
    step_recorder = StepRecorder(stopwatch, recorder.steps, recorder.timeline if config.events else None)
    profiler = StepProfiler(config.profiled_steps, folder, comm.rank, comm.device) if config.profile else None
    windows = Windows(sync, step_recorder, config.log_every, recorder.write_event, profiler, config.seconds)
    loop = TrainingLoop(config, workload, sync, source, stopwatch, step_recorder, windows, recorder.write_event)
    monitor = RunMonitor(folder, comm.rank, stopwatch.clock.now, comm.device, first_on_host=setup.world.local_rank == 0)
    recorder.add_listener(monitor)
    if config.tensorboard:
        recorder.add_listener(TensorBoardWriter(folder, comm.rank, stopwatch.clock, comm.device))
    try:
        loop.train()
        windows.finish()
        monitor.sampler.sample()
        peak = peak_bytes(setup.placement.device) if peak_is_ours else None  # Before evaluation, so of training alone.
        summary = results.summarise(config.strategy, sync, folder, windows.times, peak)
        estimate = results.estimate_epochs(config, source, summary.step_s)
        summary = msgspec.structs.replace(summary, estimate=estimate, dropped_per_epoch=source.dropped)
        recorder.write_summary(summary)  # Before evaluation, so that its failure does not lose the training's figures.
        if held_out is not None:
            with monitor.marks.span("evaluation"):
                tests = results.run_evaluations(config, workload, sync, held_out)
            recorder.write_event(tests)
            summary = msgspec.structs.replace(summary, test=tests.test, test_by_rank=tests.test_by_rank)
        recorder.finish(summary)
    finally:
        recorder.close()
    sync.close()


def optimizer_factory(config: RunConfig, workload: Workload) -> MakeOptimizer:
    """Return the workload's optimiser factory, or one for SGD with the configured settings."""
    if workload.optimizer is not None:
        return workload.optimizer
    # Fused makes one pass over each parameter instead of four: a third of the default's time on a CPU.
    return lambda parameters: torch.optim.SGD(
        parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, fused=True
    )


def _topology(setup: RankSetup, batch: int | None) -> Topology:
    config, workload, world = setup.config, setup.workload, setup.world
    workers = setup.comm.world_size
    info = emulation_info(os.environ)
    return Topology(
        workload=workload.name,
        **describe_strategy(config.strategy, setup.strategy),
        world_size=world.size,
        workers=workers,
        servers=setup.comm.servers,
        ranks_per_host=world.local_size,
        batch=batch,
        batch_per_rank=[] if batch is None else sorted({batch // workers, -(-batch // workers)}),
        **describe_placement(setup.placement, interface=world.interface),
        **describe_model(workload.model),
        classes=workload.classes,
        user_optimizer=workload.optimizer is not None,
        lr=config.lr,
        log_every=config.log_every,
        slow_rank=config.slow_rank,
        emulated=None if info is None else RecordedEmulation(spec=info.spec, host_cpus=info.host_cpus),
    )
