"""Checks a configuration before any process starts, so that a mistake costs a second and not a launch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.config import LaunchConfig, RunConfig
from paceline.config.emulation import emulation_info
from paceline.config.slow_ranks import check_slow_ranks
from paceline.config.specs import Spec
from paceline.errors import UsageError
from paceline.launch.launcher_process import LauncherProcess, Shape
from paceline.strategies.base.strategy import Role, Strategy
from paceline.strategies.registry import create
from paceline.training.sync import not_together
from paceline.training.tensorboard import check_tensorboard
from paceline.user_code import file_digest, source_digest
from paceline.workloads.names import is_own

RANKS_ON_A_CPU = 2
"""How many ranks a host gets when the user says nothing: enough to see what synchronising costs."""
OF_ONE_HOST = frozenset({"node_rank", "master", "iface", "threads", "data_dir"})
"""Settings that may differ between the hosts of a launch."""


def choose_shape(config: RunConfig, launch: LaunchConfig, launcher: LauncherProcess) -> Shape:
    """How many ranks to start on how many hosts, once everything about them is known to fit."""
    if config.tensorboard:
        check_tensorboard()
    strategy = create(config.strategy, allow_unused=config.allow_unused)
    gpus = gpus_to_use(config)
    alone = strategy.uses_one_rank(RANKS_ON_A_CPU)
    local_ranks = (
        launch.local_ranks(default=1 if alone else gpus or RANKS_ON_A_CPU)
        if launcher.ranks is None
        else launcher.local_size
    )
    shape = Shape(launcher.hosts, local_ranks)
    check_strategy(config, strategy, shape.ranks)
    check_slowed(config, strategy, shape.ranks)
    if config.backend == "nccl" and local_ranks > gpus and launcher.ranks is None:
        raise UsageError(
            f"nccl needs a GPU of its own for each rank, but there are {gpus} for {local_ranks} ranks.",
            hint=f"use --ranks {gpus} or --backend gloo" if gpus else "use --backend gloo",
        )
    return shape


def settings_of(command: str, launch: LaunchConfig, *configs: object) -> dict[str, Any]:
    """What all hosts of a launch have to have in common, for them to compare."""
    settings: dict[str, Any] = {"command": command}
    for config in (*configs, launch):
        settings |= {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(config).items()  # type: ignore[call-overload]
            if name not in OF_ONE_HOST
        }
    return settings | {"own_code": _own_code(settings)}


def _own_code(settings: Mapping[str, Any]) -> list[str | None]:
    """What tells the user's own workload, strategy and script apart from other versions of them."""
    script = settings.get("script")
    named = (str(settings["workload"]), Spec.parse(str(settings["strategy"])).name)
    modules = [name.partition(":")[0] for name in named if is_own(name)]
    return [*[source_digest(module) for module in modules], file_digest(Path(script)) if script else None]


def place_settings() -> dict[str, Any]:
    """What an experiment says of the emulation it is made in; nothing but nulls on real hosts."""
    place = emulation_info(os.environ)
    return {"emulated": place and place.spec, "host_cpus": place and place.host_cpus}


def check_strategy(config: RunConfig, strategy: Strategy, ranks: int) -> None:
    """Refuses what the strategy cannot do, and a batch that is too small for its workers."""
    strategy.check_ranks(ranks)
    roles = strategy.roles(ranks)
    config.global_batch(roles.count(Role.WORKER))
    for rank in config.slowed:
        if rank < ranks and roles[rank] is Role.SERVER:
            raise _computes_nothing(rank, strategy, roles)
    if config.bn == "sync" and not strategy.lockstep:
        raise not_together(strategy)
    wanted = {"clip": config.clip_norm is not None, "accumulate": config.accumulate > 1}
    for ability, asked in wanted.items():
        if asked and ability not in strategy.supports:
            option = {"clip": "--clip-norm", "accumulate": "--accumulate"}[ability]
            where = "" if strategy.lockstep else " where ranks do not step together"
            raise UsageError(
                f"{strategy.name} does not support {option}{where}.", hint="leave it out, or use another strategy"
            )


def check_slowed(config: RunConfig, strategy: Strategy, ranks: int) -> None:
    """Refuses to slow down a rank that is not there, or that has nothing to compute."""
    check_slow_ranks(config.slowed, ranks)
    roles = strategy.roles(ranks)
    for rank in config.slowed:
        if roles[rank] is not Role.WORKER:
            raise _computes_nothing(rank, strategy, roles)


def _computes_nothing(rank: int, strategy: Strategy, roles: Sequence[Role]) -> UsageError:
    return UsageError(
        f"--slow-rank names rank {rank}, which computes nothing under {strategy.name}.",
        hint=f"ranks that do: {', '.join(str(own) for own, role in enumerate(roles) if role is Role.WORKER)}",
    )


def gpus_to_use(config: RunConfig) -> int:
    """GPUs of this host that the run may use."""
    gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    if config.device == "cuda" and not gpus:
        raise UsageError("--device cuda was given, but torch sees no GPU.", hint="use --device cpu, or leave it out")
    return gpus
