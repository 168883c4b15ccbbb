"""`doctor`: has ranks examine their machines, the link between them and a workload, and reads what they found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceline.config import LaunchConfig, RunConfig, launched
from paceline.errors import PacelineError, RecordError
from paceline.experiments.as_rank import Watch, take_part
from paceline.experiments.names import check_names, prepare_data
from paceline.experiments.train import new_folder
from paceline.records import RunFolder
from paceline.records.examination import Examination, find_examination, read_examination, write_examination
from paceline.records.provenance import command_line
from paceline.records.schema import DOCTOR_FILE


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
    from paceline.comm.reach import check_reach
    from paceline.training.examine import examine_run

    folder = take_part(
        examine_run, config, launch, lambda: out or new_folder(config, "doctor"), watch, meet=check_reach
    )
    return None if folder is None else (read_examination(folder), folder)
