"""`doctor`: has ranks examine their machines, the link between them and a workload, and reads what they found."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config import LaunchConfig, RunConfig, launched
from paceline.errors import PacelineError, RecordError, UsageError
from paceline.experiments.names import check_names, prepare_data
from paceline.experiments.train import new_folder
from paceline.records import RunFolder
from paceline.records.examination import Examination, find_examination, read_examination, write_examination
from paceline.records.provenance import command_line
from paceline.records.schema import DOCTOR_FILE

Watch = Callable[[Path], AbstractContextManager[Any]]
"""Makes the display that follows an examination."""


def doctor(config: RunConfig, launch: LaunchConfig, out: Path | None, watch: Watch) -> tuple[Examination, Path] | None:
    """What was found, and the folder it is in; None on a host or a rank that has nothing to show: all but the first."""
    check_names(config)
    if out is not None:
        _refuse_record(out)
    if launched():
        return _as_rank(config, launch, out, watch)

    from paceline.experiments.checks import ranks_on_this_host

    local_ranks = ranks_on_this_host(config, launch)
    prepare_data(config)
    folder = out or new_folder(config, "doctor")
    with watch(folder):
        found = examine(config, launch, local_ranks, folder)
    return None if found is None else (found, folder)


def examine(
    config: RunConfig, launch: LaunchConfig, local_ranks: int, folder: Path, *, with_workload: bool = True
) -> Examination | None:
    """Starts this host's ranks and has them examine; what they leave is in the folder of the first host.

    A workload that fails is part of what was found: machines and the link were examined before it. Whatever else goes
    wrong is raised.
    """
    from paceline.launch.elastic import launch as launch_ranks
    from paceline.launch.job import Job

    _refuse_record(folder)
    place = RunFolder.create(folder)
    job = Job(
        folder=place,
        runs=((config, place),),
        task="examine" if with_workload else "examine_machines",
        timeout=config.timeout,
        iface=launch.iface,
        threads=launch.threads,
        command=command_line(),
    )
    try:
        launch_ranks(job, launch, local_ranks)
    except PacelineError as error:
        found = find_examination(folder)
        if found is None:
            raise
        hint = error.hint or f"more about it is in {folder}"
        write_examination(folder, replace(found, failure=error.message, failure_hint=hint))
    return read_examination(folder) if launch.node_rank == 0 else None


def _refuse_record(folder: Path) -> None:
    if (folder / DOCTOR_FILE).exists():
        raise RecordError(f"{folder} already holds a record.", hint="name another folder with --out, or remove it")


def _as_rank(
    config: RunConfig, launch: LaunchConfig, out: Path | None, watch: Watch
) -> tuple[Examination, Path] | None:
    """As one of the ranks that torchrun started."""
    from paceline.comm import join_world, leave_world
    from paceline.comm.reach import check_reach
    from paceline.experiments.checks import check_strategy
    from paceline.strategies.registry import create
    from paceline.training.examine import examine_run

    size = int(os.environ["WORLD_SIZE"])
    if launch.ranks not in (None, size):
        raise UsageError(
            f"--ranks {launch.ranks} was given, but the launcher started {size} ranks.",
            hint="leave --ranks out under torchrun, or set its --nproc-per-node",
        )
    check_strategy(config, create(config.strategy), size)
    prepare_data(config)
    world = join_world(timeout_s=config.timeout, iface=launch.iface, meet=check_reach)
    if world.rank == 0:
        world.announce("folder", str(RunFolder.create(out or new_folder(config, "doctor")).path))
    folder = RunFolder(Path(world.wait_for("folder")))
    folder.path.mkdir(parents=True, exist_ok=True)  # On a host that does not share rank 0's disk.
    if world.rank != 0:
        examine_run(config, world, folder, threads=launch.threads)
        leave_world()
        return None
    with watch(folder.path):
        examine_run(config, world, folder, threads=launch.threads)
    leave_world()
    return read_examination(folder.path), folder.path
