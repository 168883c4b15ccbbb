"""Taking part as one rank of somebody else's launch (torchrun): one folder for all, which rank 0 chooses."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import LaunchConfig, RunConfig
from paceline.errors import UsageError
from paceline.experiments.names import prepare_data
from paceline.records import RunFolder

if TYPE_CHECKING:
    from paceline.comm.world import Meet

Watch = Callable[[Path], AbstractContextManager[Any]]
"""Makes the display that follows a folder while what is in it grows."""


def take_part(
    task: Callable[..., None],
    config: RunConfig,
    launch: LaunchConfig,
    choose_folder: Callable[[], Path],
    watch: Watch,
    meet: Meet | None = None,
) -> Path | None:
    """Joins the other ranks and does a task with them; the folder that it left something in, None but on rank 0."""
    from paceline.comm import join_world, leave_world
    from paceline.experiments.checks import check_strategy
    from paceline.strategies.registry import create

    size = int(os.environ["WORLD_SIZE"])
    if launch.ranks not in (None, size):
        raise UsageError(
            f"--ranks {launch.ranks} was given, but the launcher started {size} ranks.",
            hint="leave --ranks out under torchrun, or set its --nproc-per-node",
        )
    check_strategy(config, create(config.strategy), size)
    prepare_data(config)
    world = join_world(timeout_s=config.timeout, iface=launch.iface, meet=meet)
    if world.rank == 0:
        world.announce("folder", str(RunFolder.create(choose_folder()).path))
    folder = RunFolder(Path(world.wait_for("folder")))
    folder.path.mkdir(parents=True, exist_ok=True)  # On a host that does not share rank 0's disk.
    with watch(folder.path) if world.rank == 0 else nullcontext():
        task(config, world, folder, threads=launch.threads)
    leave_world()
    return folder.path if world.rank == 0 else None
