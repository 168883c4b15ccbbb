"""One run on one rank, from the configuration to the record."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from paceline.comm import World, close_comm
from paceline.comm.stores.stop_request import StopRequest
from paceline.config import RunConfig
from paceline.errors import PreemptedError
from paceline.measure.start_up import START_UP
from paceline.records import RunFolder, Topology
from paceline.records.description import RecordedRecipe
from paceline.records.summary import Summary
from paceline.strategies.base.strategy import MakeOptimizer
from paceline.training.checkpoints.rehearsal import rehearse_step
from paceline.training.checkpoints.resume import find_resume_point
from paceline.training.checkpoints.storage.weights import save_weights
from paceline.training.checks.data import check_same_data
from paceline.training.checks.model import check_model
from paceline.training.compiled import check_can_compile, compile_in_place
from paceline.training.compiler_import import import_compiler_if_used
from paceline.training.core_binding import bound_to
from paceline.training.loop import RAISED_ON_ALL_RANKS, TrainingLoop
from paceline.training.optimizers.make import make_optimizer
from paceline.training.rank_setup import RankSetup, check_batch_fits, set_up_rank
from paceline.training.recording import results
from paceline.training.recording.evaluations import Evaluations, make_held_out
from paceline.training.recording.recording import Recording
from paceline.training.recording.run_recorder import WriteEvent, discard_event
from paceline.training.sync import Sync
from paceline.training.topology import topology_of
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
    resume: Path | None = None,
    launched_at_s: float | None = None,
    precision_file: Path | None = None,
) -> None:
    """Train, evaluate and write the record. Servers serve, and idle ranks wait, until the workers have finished.

    `number` is the index of the run in its job, `command` the command line of the user. `on_event` is called on every
    rank with each event that rank 0 writes to the record. `resume` is the folder, or the checkpoint, that the run goes
    on from; a restart goes on from the run's own folder, or begins again if that has no checkpoint. `launched_at_s` is
    the Unix time at which the ranks were launched, or at which the run before this one ended. `precision_file` has the
    choices of `--precision auto`.
    """
    setup = set_up_rank(config, world, threads, timed=True, precision_file=precision_file)
    if setup is None:
        world.wait_for(f"run-{number}")
        return
    if setup.comm.is_server:
        with bound_to(setup.placement.cores):
            setup.serve(optimizer_factory(setup.workload, setup.source().batch))
        close_comm(setup.comm)
        return
    try:
        _run_as_worker(setup, folder, on_event, command, resume, launched_at_s)
    except PreemptedError:
        if setup.comm.rank == 0:
            world.announce(f"run-{number}")  # Idle ranks end, too.
        raise
    if setup.comm.rank == 0:
        world.announce(f"run-{number}")


def _run_as_worker(
    setup: RankSetup,
    folder: RunFolder,
    on_event: WriteEvent,
    command: str | None,
    resume: Path | None,
    launched_at_s: float | None,
) -> None:
    config, workload, comm, model = setup.config, setup.workload, setup.comm, setup.model
    source = setup.source()
    check_batch_fits(config, comm.world_size, source.samples)
    held_out = make_held_out(config, workload, setup.share)
    sources = {"training data": source} | ({} if held_out is None else {"test data": held_out.shared})
    check_same_data(sources, comm.control)
    START_UP.end_of("moving model and data")
    flop = check_model(model, workload, source, config, comm.rank, sources.get("test data"), count_flop=True)
    START_UP.end_of("checking the model")
    point = None if resume is None else find_resume_point(resume, folder, comm)
    with Recording(
        config,
        comm,
        folder,
        first_on_host=setup.world.local_rank == 0,
        on_event=on_event,
        resumed=None if point is None else point.resumed,
    ) as recording:
        recording.describe(dataclasses.asdict(config), _topology(setup, source.batch, flop), command)
        if config.compile:
            check_can_compile(comm.device.type)
            compile_in_place(model)
        sync = Sync(model, optimizer_factory(workload, source.batch), setup.strategy, comm, config.bn)
        import_compiler_if_used(sync.optimizer)
        sync.guard_replicas(config.replica_guard)
        sync.measure_noise(config.noise_scale, config.accumulate)
        recording.start(sync)
        evaluations = None if held_out is None else Evaluations(config, workload, sync, held_out, recording)
        loop = TrainingLoop(
            config,
            workload,
            sync,
            source,
            recording,
            evaluations,
            folder.path,
            setup.given,
            StopRequest(setup.world.store),
            launched_at_s,
        )
        if point is not None:
            if config.deterministic and point.info is not None and setup.strategy.lockstep:
                rehearse_step(sync, workload, source)
            recording.write_event(point.event(loop.resume(point)))
        START_UP.end_of("opening the record")
        with bound_to(setup.placement.cores):  # Only now, so that the record has the load of the whole host.
            _train(loop)
            summary = _evaluated(loop)
        if config.save:
            _save_weights(sync, Path(config.save))
        recording.finish(summary)
    sync.close()


def _train(loop: TrainingLoop) -> None:
    """Train; after an error that all ranks raise alike, they write the summary and close in order."""
    try:
        loop.train()
    except RAISED_ON_ALL_RANKS:
        loop.recording.write_summary(loop.recording.summarise())
        loop.sync.guard = None  # Replicas of weights that are not finite need no comparison.
        loop.sync.close()
        raise


def _evaluated(loop: TrainingLoop) -> Summary:
    """Write the summary of what was trained, evaluate, and return the summary with the result."""
    recording, source = loop.recording, loop.source
    summary = recording.summarise()
    estimate = results.estimate_epochs(loop.config, source, summary.step_s)
    summary = msgspec.structs.replace(summary, estimate=estimate, dropped_per_epoch=source.dropped)
    recording.write_summary(summary)  # Before evaluation, so that its failure does not lose the training's figures.
    if loop.evaluations is None:
        return summary
    tests, best = loop.evaluations.at_end(summary.steps), loop.evaluations.best
    if loop.checkpointer is not None and best is not None and loop.sync.rank == 0:
        loop.checkpointer.mark_best(best.step)
    return msgspec.structs.replace(summary, test=tests.test, best=best, test_by_rank=tests.test_by_rank)


def _save_weights(sync: Sync, file: Path) -> None:
    """Write the weights that the run ships; rank 0 writes them."""
    with sync.agreed() as model:
        sync.comm.control.while_others_wait(lambda: save_weights(model.state_dict(), file))


def optimizer_factory(workload: Workload, batch: int | None) -> MakeOptimizer:
    """Return the workload's optimiser factory, or that of its recipe at the learning rate of the global batch."""
    if workload.optimizer is not None:
        return workload.optimizer
    recipe = workload.recipe
    assert recipe is not None, "load_workload() sets the recipe"
    lr = recipe.peak_lr(batch)
    return lambda parameters: make_optimizer(parameters, recipe, lr)


def _topology(setup: RankSetup, batch: int | None, flop_per_sample: float | None) -> Topology:
    config, workload, world = setup.config, setup.workload, setup.world
    recipe = workload.recipe
    assert recipe is not None, "load_workload() sets the recipe"
    return topology_of(
        config,
        setup.strategy,
        workload.model,
        setup.comm,
        setup.placement,
        workload=workload.name,
        interface=world.interface,
        world_size=world.size,
        ranks_per_host=world.local_size,
        ranks_sharing_cores=world.ranks_sharing_cores,
        batch=batch,
        flop_per_sample=flop_per_sample,
        classes=workload.classes,
        lr=None if workload.optimizer is not None else recipe.peak_lr(batch),
        recipe=RecordedRecipe(
            optimizer="" if workload.optimizer is not None else recipe.optimizer,
            schedule="" if workload.scheduler is not None else recipe.schedule,
            warmup_epochs=recipe.warmup_epochs,
            warmup_steps=recipe.warmup_steps,
            lr=recipe.lr,
            reference_batch=recipe.reference_batch,
            scale_lr=recipe.scale_lr,
        ),
        precision=config.precision,
        precision_choice=setup.precision_choice,
        user_optimizer=workload.optimizer is not None,
    )
