"""`doctor`: has ranks examine their machines, the link between them and a workload, and reads what they found."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import LaunchConfig, RunConfig
from paceline.errors import PacelineError, RecordError
from paceline.experiments.names import check_names, prepare_data
from paceline.experiments.train import FollowRun, new_folder
from paceline.launch.launcher_process import Notify
from paceline.records import RunFolder
from paceline.records.examination import Examination, find_examination, read_examination, write_examination
from paceline.records.provenance import command_line
from paceline.records.schema import DOCTOR_FILE

if TYPE_CHECKING:
    from paceline.launch.launcher_process import Shape
    from paceline.launch.leader import Leader


def doctor(
    config: RunConfig, launch: LaunchConfig, out: Path | None, watch: FollowRun, notify: Notify
) -> tuple[Examination, Path] | None:
    """What was found, and the folder it is in; None on a host that has nothing to show: all but the first."""
    check_names(config)
    if out is not None:
        _refuse_record(out)

    from paceline.experiments.checks import choose_shape, settings_of
    from paceline.launch.leader import join_launch
    from paceline.launch.rank_assignment import find_launcher_process

    launcher = find_launcher_process(launch, os.environ)
    shape = choose_shape(config, launch, launcher)
    prepare_data(config)
    leader = join_launch(
        launcher, launch, settings_of("doctor", launch, config), timeout_s=config.timeout, notify=notify
    )
    if leader is None:
        return None
    with leader:
        folder = out or new_folder(config, "doctor")
        with watch(folder):
            return examine(config, leader, shape, folder), folder


def examine(
    config: RunConfig, leader: Leader, shape: Shape, folder: Path, *, with_workload: bool = True
) -> Examination:
    """Has ranks examine; what they leave is in the folder.

    A workload that fails is part of what was found: machines and the link were examined before it. Whatever else goes
    wrong is raised.
    """
    from paceline.launch.job import Job

    _refuse_record(folder)
    place = RunFolder.create(folder)
    job = Job(
        folder=place,
        runs=((config, place),),
        task="examine" if with_workload else "examine_machines",
        timeout=config.timeout,
        iface=leader.launch.iface,
        threads=leader.launch.threads,
        command=command_line(),
    )
    try:
        leader.run(job, shape)
    except PacelineError as error:
        found = find_examination(folder)
        if found is None:
            raise
        hint = error.hint or f"more about it is in {folder}"
        write_examination(folder, replace(found, failure=error.message, failure_hint=hint))
    return read_examination(folder)


def _refuse_record(folder: Path) -> None:
    if (folder / DOCTOR_FILE).exists():
        raise RecordError(
            f"{folder} already contains a record.", hint="name another folder with --out, or remove this one"
        )
