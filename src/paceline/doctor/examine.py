"""Examination on each rank: gather rank information, measure the link, train a few steps of the workload."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from paceline.comm import Comm, World, close_comm, open_comm
from paceline.comm.messages.json_messages import gather_typed
from paceline.config import EXAMINED_SETTINGS, RunConfig
from paceline.doctor.contention import measure_contention
from paceline.doctor.link import measure_all_reduce, measure_pairs
from paceline.doctor.measuring_cost import measure_cost
from paceline.doctor.rank_info import gather_rank_info
from paceline.errors import WorkloadError
from paceline.records import EventWriter, RunFolder, provenance, read_run
from paceline.records.events import EndEvent, StageEvent
from paceline.records.examination import AllReduceTimes, Examination, MeasuredLinks, WorkloadNeeds, write_examination
from paceline.strategies.base.strategy import Role
from paceline.strategies.registry import create
from paceline.training.placement import Placement
from paceline.training.run import run
from paceline.training.topology import recorded_emulation

STEPS = 4
"""Steps of the workload. After two, all memory that training needs is allocated (optimiser state, DDP's buckets)."""
SUBGROUP_S = 1.0
"""Time budget for all-reduces within a subgroup of the ranks."""
MAX_SUBGROUPS_WITHIN_HOSTS = 4
WORKLOAD_FOLDER = "workload"

OpenComm = Callable[[Sequence[int]], Comm | None]
"""Function that opens process groups among the given ranks, as training does; called on all ranks."""


def examine_run(
    config: RunConfig,
    world: World,
    folder: RunFolder,
    *,
    threads: int | None,
    number: int = 0,
    command: str | None = None,
    precision_file: Path | None = None,
    with_workload: bool = True,
) -> None:
    """Examine machines, link and workload, and write the result to rank 0's disk.

    The result is written before the workload runs, so that it is kept if the workload fails. `precision_file` has the
    choices of `--precision auto`.
    """
    began = time.perf_counter()
    progress = ExaminationProgress(folder, world.rank)
    examination = _examine_machines(config, world, folder.path, threads, command, progress)
    if with_workload:
        progress.enter("workload")
        short = examined_config(config)
        needs = _try_workload(short, world, folder.path / WORKLOAD_FOLDER, threads, number, command, precision_file)
        examination = replace(examination, workload=needs)
        if world.rank == 0:
            write_examination(folder.path, examination)
        progress.enter("cost")
        examination = replace(
            examination,
            measuring_cost=measure_cost(short, world, threads=threads, number=number, precision_file=precision_file),
        )
    if world.rank == 0:
        write_examination(folder.path, replace(examination, measured_s=time.perf_counter() - began))
        folder.mark_finished()
    progress.close()


examine_machines = functools.partial(examine_run, with_workload=False)
"""The same without a workload: used for a user's script, which must own its process."""


def examined_config(config: RunConfig) -> RunConfig:
    """Return the config of the few steps that the doctor trains: like the runs that it is about, but short."""
    return RunConfig(**{name: getattr(config, name) for name in EXAMINED_SETTINGS}, steps=STEPS, evaluate=False)


class ExaminationProgress:
    """Writer of the examination's stages to rank 0's events, for the live display."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self._events = EventWriter(folder) if rank == 0 else None

    def enter(self, stage: str) -> None:
        """Record that the next stage begins."""
        if self._events is not None:
            self._events.write(StageEvent(stage=stage))

    def close(self) -> None:
        """Record the end and close the file."""
        if self._events is not None:
            self._events.write(EndEvent())
            self._events.close()


def _examine_machines(
    config: RunConfig,
    world: World,
    folder: Path,
    threads: int | None,
    command: str | None,
    progress: ExaminationProgress,
) -> Examination:
    """Run everything except the workload, and write the result before any code of the user's runs."""
    progress.enter("machines")
    placement = Placement.choose(config, world, [Role.WORKER] * world.size, threads)
    placement.apply(config)
    open_groups = functools.partial(
        open_comm, device=placement.device, backend=placement.backend, timeout_s=config.timeout_s
    )
    comm = open_groups(range(world.size))
    assert comm is not None
    rank_info = gather_rank_info(world, placement, comm, folder)
    link = contention = None
    if world.size > 1:
        link = _measure_link(comm, [rank.host for rank in rank_info], open_groups, progress)
        progress.enter("contention")
        contention = measure_contention(comm, link.all_reduces[0].points)
    examination = Examination(
        provenance=provenance(command),
        ranks=rank_info,
        link=link,
        contention=contention,
        workload=None,
        emulated=recorded_emulation(),
    )
    if world.rank == 0:
        write_examination(folder, examination)
    comm.control.barrier()  # No rank may continue, and perhaps fail, before the result is on disk.
    close_comm(comm)
    return examination


def _measure_link(
    comm: Comm, hosts: Sequence[int], open_groups: OpenComm, progress: ExaminationProgress
) -> MeasuredLinks:
    """Measure pairs, all ranks together and, on several hosts, subgroups within a host and between hosts."""
    progress.enter("link")
    pairs = measure_pairs(comm, hosts)
    progress.enter("all-reduce")
    over_all_ranks = AllReduceTimes(
        ranks=[*range(len(hosts))], hosts=sorted(set(hosts)), points=measure_all_reduce(comm)
    )
    measured = []
    for ranks in subgroups_to_measure(hosts):
        comm.control.barrier()  # One subgroup is measured at a time.
        subgroup = open_groups(ranks)
        if subgroup is None:
            continue
        points = measure_all_reduce(subgroup, SUBGROUP_S)
        close_comm(subgroup)
        if subgroup.rank == 0:
            measured.append(AllReduceTimes(ranks=ranks, hosts=sorted({hosts[rank] for rank in ranks}), points=points))
    parts = [part for rank in gather_typed(measured, list[AllReduceTimes], comm.control) for part in rank]
    return MeasuredLinks(pairs, [over_all_ranks, *sorted(parts, key=lambda part: not part.within_host)])


def subgroups_to_measure(hosts: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each host, then the first rank of each host; leaves out what equals all ranks."""
    members = [[rank for rank, host in enumerate(hosts) if host == own] for own in sorted(set(hosts))]
    if len(members) == 1:
        return []
    within = [ranks for ranks in members if len(ranks) > 1]
    return within[:MAX_SUBGROUPS_WITHIN_HOSTS] + ([[ranks[0] for ranks in members]] if within else [])


def _try_workload(
    config: RunConfig,
    world: World,
    folder: Path,
    threads: int | None,
    number: int,
    command: str | None,
    precision_file: Path | None,
) -> WorkloadNeeds | None:
    """Train a few steps as a separate run; return the resources that it needed on rank 0, None elsewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    run(
        config,
        world,
        RunFolder(folder),
        threads=threads,
        number=number,
        command=command,
        precision_file=precision_file,
    )
    if world.rank != 0:
        return None
    record = read_run(folder)
    assert record.summary is not None
    trained = record.summary.ranks
    times = [rank.median_step_s for rank in trained if rank.median_step_s is not None]
    if not times:
        raise WorkloadError("the training data has fewer than two batches.", hint="use a smaller --batch")
    roles = create(config.strategy).roles(world.size)
    workers = [rank for rank, role in enumerate(roles) if role is Role.WORKER]
    peaks = {rank: summary.peak_bytes for rank, summary in zip(workers, trained, strict=True)}
    topology = record.topology
    return WorkloadNeeds(
        name=topology.workload,
        strategy=config.strategy,
        batch=topology.batch,
        workers=topology.workers,
        parameters=topology.parameters,
        gradient_bytes=topology.gradient_bytes,
        steps=record.summary.steps,
        step_s=max(times),
        peak_bytes=[peaks.get(rank) for rank in range(world.size)],
        precision=topology.precision,
        is_precision_chosen=topology.precision_choice is not None,
    )
