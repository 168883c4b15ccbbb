"""`paceline train`: one run, on one host or several."""

from __future__ import annotations

import functools
import itertools
import os
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.config import LaunchConfig, RunConfig
from paceline.errors import RecordError
from paceline.experiments.names import check_names, prepare_data
from paceline.launch.launcher_process import Notify
from paceline.records import RunFolder, RunRecord, read_run
from paceline.workloads.given_settings import check_needed

if TYPE_CHECKING:
    from paceline.launch.launcher_process import Shape
    from paceline.launch.leader import Leader

FollowRun = Callable[[Path], AbstractContextManager[Any]]
"""Makes the live display of a record that grows in a folder."""


def train(
    config: RunConfig,
    launch: LaunchConfig,
    out: Path | None,
    follow: FollowRun,
    notify: Notify,
    resume: Path | None = None,
) -> RunRecord | None:
    """Train and return the record; None on all launcher processes but the leader.

    With `resume`, the run goes on from that checkpoint, or from the newest one of that folder, in the folder `out`.
    """
    check_names(config)
    check_needed(config, launch)

    from paceline.experiments.checks import check_save, config_on_fewer_hosts
    from paceline.launch.faults.restarts import RestartingLeader
    from paceline.launch.job import Job
    from paceline.launch.rank_assignment import find_launcher_process

    check_save(config, find_launcher_process(launch, os.environ))
    leader, shape = join_for_run("train", config, launch, notify)
    if leader is None:
        return None
    with leader:
        path = out or resume or new_folder(config)
        with RunFolder.locked(path):
            folder = RunFolder.create(path) if resume is None else RunFolder.open(path, resume)
            job = Job.single(config, folder, iface=launch.iface, threads=launch.threads)
            if resume is not None:
                # An error file of an earlier attempt must not explain a failure of this one.
                own = folder.next_attempt() if folder.has_record else folder
                job = replace(job, resume=str(resume), folder=own)
            with follow(folder.path):
                on_fewer_hosts = functools.partial(config_on_fewer_hosts, config, shape)
                RestartingLeader(leader, launch, on_fewer_hosts, notify).run(job, shape)
    return read_run(folder.path)


def join_for_run(
    command: Literal["train", "doctor"], config: RunConfig, launch: LaunchConfig, notify: Notify
) -> tuple[Leader | None, Shape]:
    """Check the configuration, fetch the data and join the launch; there is a leader on one launcher process only."""
    from paceline.experiments.checks import choose_shape, settings_of
    from paceline.launch.channel.own_command import EXAMINING, TRAINING, OwnCommand
    from paceline.launch.leader import join_launch
    from paceline.launch.rank_assignment import find_launcher_process

    launcher = find_launcher_process(launch, os.environ)
    shape = choose_shape(config, launch, launcher)
    prepare_data(config)
    settings = settings_of(command, launch, config)
    own = OwnCommand(configs=(config,), tasks=TRAINING if command == "train" else EXAMINING)
    return join_launch(launcher, launch, settings, own, timeout_s=config.timeout_s, notify=notify), shape


def new_folder(config: RunConfig, what: str | None = None) -> Path:
    """Make a new folder under runs/, named by time, workload and what is done."""
    words = re.sub(r"[^A-Za-z0-9_=.]+", "-", f"{config.workload}-{what or config.strategy}")
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{words}"
    for attempt in itertools.count(1):
        path = Path("runs") / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            hint = "name a writable folder with --out"
            raise RecordError(f"cannot write to {path}: {error.strerror}.", hint=hint) from None
        return path
    raise AssertionError("itertools.count never ends")
