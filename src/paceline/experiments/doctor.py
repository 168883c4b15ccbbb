"""`paceline doctor`: start ranks that examine machines, links and a workload, and read their results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from paceline.config import LaunchConfig, RunConfig
from paceline.errors import PacelineError, RecordError
from paceline.experiments.names import check_names
from paceline.experiments.train import FollowRun, join_for_run, new_folder
from paceline.launch.launcher_process import Notify
from paceline.records import RunFolder
from paceline.records.examination import Examination, find_examination, read_examination, write_examination
from paceline.records.provenance import command_line
from paceline.records.schema import DOCTOR_FILE, PRECISION_FILE

if TYPE_CHECKING:
    from paceline.launch.launcher_process import Shape
    from paceline.launch.leader import Leader


def doctor(
    config: RunConfig, launch: LaunchConfig, out: Path | None, follow: FollowRun, notify: Notify
) -> tuple[Examination, Path] | None:
    """Return the examination and its folder; None on all hosts but the leader's."""
    check_names(config)
    if out is not None:
        _refuse_record(out)
    leader, shape = join_for_run("doctor", config, launch, notify)
    if leader is None:
        return None
    with leader:
        folder = out or new_folder(config, "doctor")
        with follow(folder):
            return examine(config, leader, shape, folder), folder


def examine(
    config: RunConfig,
    leader: Leader,
    shape: Shape,
    folder: Path,
    *,
    with_workload: bool = True,
    precision_file: Path | None = None,
) -> Examination:
    """Start ranks that examine, and read what they wrote to the folder.

    A workload that fails is part of the result, since machines and links are examined before it. Any other error is
    raised.
    """
    from paceline.launch.job import Job

    _refuse_record(folder)
    run_folder = RunFolder.create(folder)
    job = Job(
        folder=run_folder,
        runs=((config, run_folder),),
        task="examine" if with_workload else "examine_machines",
        timeout=config.timeout_s,
        hang_timeout=config.hang_timeout,
        iface=leader.launch.iface,
        threads=leader.launch.threads,
        precision_file=str(precision_file or folder / PRECISION_FILE),
        command=command_line(),
    )
    try:
        leader.run(job, shape)
    except PacelineError as error:
        found = find_examination(folder)
        if found is None:
            raise
        hint = error.hint or f"see the logs in {folder}"
        write_examination(folder, replace(found, failure=error.message, failure_hint=hint))
    return read_examination(folder)


def _refuse_record(folder: Path) -> None:
    if (folder / DOCTOR_FILE).exists():
        raise RecordError(
            f"{folder} already contains a record.", hint="name another folder with --out, or remove this one"
        )
