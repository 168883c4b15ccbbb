"""Whole runs on ranks of the pool: each trains as a rank of a launch does, but nothing is launched."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from paceline.comm import Comm, World, open_comm
from paceline.comm.stores.stop_request import request_stop
from paceline.config import RunConfig
from paceline.errors import PacelineError
from paceline.measure.steps import make_stopwatch
from paceline.records import RunFolder, RunRecord, read_run
from paceline.records.events import LogEvent
from paceline.records.schema import CHECKPOINTS_FOLDER
from paceline.strategies.base.strategy import Role
from paceline.strategies.registry import create
from paceline.training.checkpoints.storage.load import read_info
from paceline.training.run import run
from ranks import SIZE, Pool

Disturbance = Callable[[], AbstractContextManager[Any]]
"""Makes the context of a rank's run, such as one in which a file cannot be written."""
CPU = torch.device("cpu")


def train(
    pool: Pool,
    folder: Path,
    ranks: int = 2,
    *,
    resume: Path | None = None,
    stop_after: int | None = None,
    disturbed_by: Disturbance = nullcontext,
    **settings: Any,
) -> list[PacelineError | None]:
    """Train in a folder on the first ranks; return the error of each.

    The run is asked to stop when the window that ends at step `stop_after` or later is in the record.
    """
    (RunFolder.create(folder) if resume is None else RunFolder.open(folder, folder))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return pool.run(_train, SIZE, settings, folder, ranks, resume, store.port, stop_after, disturbed_by)[:ranks]


def trained(pool: Pool, folder: Path, ranks: int = 2, **settings: Any) -> RunRecord:
    """Train in a folder; return the record of a run that succeeds."""
    assert train(pool, folder, ranks, **settings) == [None] * ranks
    return read_run(folder)


def checkpoint(folder: Path, step: int) -> Path:
    """Return the path of a checkpoint of a run."""
    return folder / CHECKPOINTS_FOLDER / f"step-{step:08d}"


def positions(folder: Path) -> list[tuple[int, int, int]]:
    """Return the step, the epoch and the samples of the epoch of each checkpoint."""
    infos = [read_info(path) for path in sorted((folder / CHECKPOINTS_FOLDER).glob("step-*"))]
    return [(info.step, info.epoch, info.epoch_samples) for info in infos]


def _train(
    _: Comm,
    settings: dict[str, Any],
    folder: Path,
    ranks: int,
    resume: Path | None,
    port: int,
    stop_after: int | None,
    disturbed_by: Disturbance,
) -> PacelineError | None:
    config = RunConfig(**{"evaluate": False, "timeout": 30.0} | settings)
    rank = dist.get_rank()
    if rank >= ranks:
        _help_to_open_groups(config, ranks)
        return None
    store = TCPStore("127.0.0.1", port)
    world = World(rank, ranks, local_rank=rank, local_size=ranks, interface="lo", ranks_sharing_cores=1, store=store)

    def watch(event: Any) -> None:
        if stop_after is not None and isinstance(event, LogEvent) and event.step >= stop_after:
            request_stop(store)

    try:
        with disturbed_by():
            run(config, world, RunFolder(folder), threads=1, on_event=watch, resume=resume)
    except PacelineError as error:
        return error
    return None


def _help_to_open_groups(config: RunConfig, ranks: int) -> None:
    """Make the groups of a run on a rank outside of it, as all ranks of the pool must."""
    roles = create(config.strategy).roles(ranks)
    workers, servers = ([n for n, own in enumerate(roles) if own is role] for role in (Role.WORKER, Role.SERVER))
    open_comm(
        workers,
        servers=servers,
        device=CPU,
        backend="gloo",
        timeout_s=config.timeout,
        stopwatch=make_stopwatch(CPU, events=True),
    )
