"""One run: started through our launcher, or as one rank of somebody else's (torchrun)."""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path

from paceline.config import LaunchConfig, RunConfig, launched
from paceline.errors import RecordError
from paceline.experiments.as_rank import Watch, take_part
from paceline.experiments.names import check_names, prepare_data
from paceline.records import RunFolder, RunRecord, read_run


def train(config: RunConfig, launch: LaunchConfig, out: Path | None, watch: Watch) -> RunRecord | None:
    """Trains and returns the record; None on a rank that has nothing to show (under torchrun, all but the first)."""
    check_names(config)
    if launched():
        return _as_rank(config, launch, out, watch)

    from paceline.experiments.checks import ranks_on_this_host
    from paceline.launch.elastic import launch as launch_ranks
    from paceline.launch.job import Job

    local_ranks = ranks_on_this_host(config, launch)
    prepare_data(config)
    folder = RunFolder.create(out or new_folder(config))
    job = Job.single(config, folder, iface=launch.iface, threads=launch.threads)
    with watch(folder.path):
        launch_ranks(job, launch, local_ranks)
    return read_run(folder.path) if launch.node_rank == 0 else None


def new_folder(config: RunConfig, what: str | None = None) -> Path:
    """Makes a folder under runs/, named so that a listing tells them apart; no two runs or experiments get the same."""
    words = re.sub(r"[^A-Za-z0-9_=.]+", "-", f"{config.workload}-{what or config.strategy}")
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{words}"
    for attempt in itertools.count(1):
        path = Path("runs") / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            hint = "name a folder that can be written to with --out"
            raise RecordError(f"cannot write to {path}: {error.strerror}.", hint=hint) from None
        return path
    raise AssertionError("there are more names than runs")


def _as_rank(config: RunConfig, launch: LaunchConfig, out: Path | None, watch: Watch) -> RunRecord | None:
    from paceline.training.run import run
    from paceline.training.scalars import check_tensorboard

    if config.tensorboard:
        check_tensorboard()
    folder = take_part(run, config, launch, lambda: out or new_folder(config), watch)
    return None if folder is None else read_run(folder)
