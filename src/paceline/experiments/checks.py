"""Checks of a configuration before any process starts, so that a mistake costs a second and not a launch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.analysis.steps.split import WARM_UP_STEPS
from paceline.config import LaunchConfig, RunConfig
from paceline.config.emulation import emulation_info
from paceline.config.launch import DEFAULT_CPU_RANKS
from paceline.config.recipe import is_recipe_file
from paceline.config.setting import metadata_of
from paceline.config.slow_ranks import check_slow_ranks
from paceline.config.specs import Spec, split_list
from paceline.errors import UsageError
from paceline.formatting import plural
from paceline.launch.launcher_process import LauncherProcess, Shape
from paceline.strategies.base.abilities import GivesTickets, LimitsRanks, ServesParameters, SlowOnGpus, UsesAllGpus
from paceline.strategies.base.scaling import why_no_scaler
from paceline.strategies.base.strategy import Role, Strategy, uses_one_rank
from paceline.strategies.registry import create, parse_list, selected_by_set
from paceline.training.checkpoints.storage.weights import check_weights_file
from paceline.training.compiled import check_can_compile
from paceline.training.core_binding import check_can_bind
from paceline.training.graphs.make_step import why_no_graph
from paceline.training.recording.tensorboard import check_tensorboard
from paceline.training.sync import sync_batchnorm_unsupported
from paceline.user_code import file_digest, source_digest
from paceline.workloads.names import is_user_workload
from paceline.workloads.recipes import choose_recipe


def choose_shape(config: RunConfig, launch: LaunchConfig, launcher: LauncherProcess) -> Shape:
    """Return the number of hosts and ranks to start; raise if config, strategy and devices do not fit them."""
    if config.tensorboard:
        check_tensorboard()
    strategy = create(config.strategy, allow_unused=config.allow_unused)
    gpus = gpus_to_use(config)
    # Emulated hosts share the cores of one machine, so each gets one rank.
    alone = uses_one_rank(strategy, DEFAULT_CPU_RANKS) or emulation_info(os.environ) is not None
    local_ranks = (
        launch.local_ranks(default=1 if alone else gpus or DEFAULT_CPU_RANKS)
        if launcher.ranks is None
        else launcher.local_size
    )
    shape = Shape(launcher.hosts, local_ranks)
    if (launch.min_hosts or 0) > shape.hosts:
        raise UsageError(
            f"--min-hosts is {launch.min_hosts}, but the launch has {plural(shape.hosts, 'host')}.",
            hint="it is the fewest hosts to go on with: give fewer, or leave it out",
        )
    check_strategy(config, strategy, shape.ranks)
    check_slowed(config, strategy, shape.ranks)
    if config.backend == "nccl" and local_ranks > gpus and launcher.ranks is None:
        raise UsageError(
            f"nccl needs one GPU per rank, but this host has {gpus} for {local_ranks} ranks.",
            hint=f"use --ranks {gpus} or --backend gloo" if gpus else "use --backend gloo",
        )
    return shape


def config_on_fewer_hosts(config: RunConfig, first: Shape, shape: Shape) -> RunConfig:
    """Return the config of a run that goes on with fewer hosts than it began with; its global batch stays.

    Raise if the run cannot have as few ranks.
    """
    strategy = create(config.strategy, allow_unused=config.allow_unused)
    batch = config.global_batch(strategy.roles(first.ranks).count(Role.WORKER))
    config = dataclasses.replace(config, batch=batch, batch_per_rank=None)
    check_strategy(config, strategy, shape.ranks)
    check_slowed(config, strategy, shape.ranks)
    return config


def check_length(steps: Iterable[int | None], default: int) -> None:
    """Raise if a run of so many steps consists of warm-up steps; None for a run that another setting ends."""
    for number in steps:
        if number is not None and number <= WARM_UP_STEPS:
            raise UsageError(
                f"--steps {number} leaves no step to measure: the first {WARM_UP_STEPS} are warm-up.",
                hint=f"use --steps {default}, or leave it out",
            )


def settings_of(command: str, launch: LaunchConfig, *configs: object) -> dict[str, Any]:
    """Return the settings that must be equal on all hosts of a launch."""
    settings: dict[str, Any] = {"command": command}
    for config in (*configs, launch):
        settings |= {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(config).items()  # type: ignore[call-overload]
            if not metadata_of(type(config))[name].per_host
        }
    return settings | {"user_code": _user_code(settings)}


def _user_code(settings: Mapping[str, Any]) -> list[str | None]:
    """Return digests of the user's code and recipe files, to detect different versions between hosts."""
    script = settings.get("script")
    strategies = [str(settings["strategy"]), *split_list(str(settings.get("strategies", "")))]
    named = [str(settings["workload"]), *[Spec.parse(text).name for text in strategies]]
    modules = dict.fromkeys(name.partition(":")[0] for name in named if is_user_workload(name))
    varied = [text.partition("=") for text in settings.get("vary", ())]
    recipes = [str(settings["recipe"]), *[n for key, _, names in varied if key == "recipe" for n in names.split(",")]]
    files = [*([script] if script else []), *filter(is_recipe_file, recipes)]
    return [*map(source_digest, modules), *[file_digest(Path(file)) for file in files]]


def check_strategy(config: RunConfig, strategy: Strategy, ranks: int) -> None:
    """Raise for settings that the strategy does not support, and for a batch too small for its workers."""
    if isinstance(strategy, UsesAllGpus):
        strategy.check_gpus(visible_gpus(config))
    if isinstance(strategy, LimitsRanks):
        strategy.check_ranks(ranks)
    roles = strategy.roles(ranks)
    _check_abilities(strategy, roles)
    config.global_batch(roles.count(Role.WORKER))
    for rank in config.slowed:
        if rank < ranks and roles[rank] is Role.SERVER:
            raise _does_not_train(rank, strategy, roles)
    if config.bn == "sync" and not strategy.lockstep:
        raise sync_batchnorm_unsupported(strategy)
    # A user's workload may bring a recipe with fp16; then ranks raise.
    if choose_recipe(config).precision == "fp16" and (reason := why_no_scaler(strategy)) is not None:
        raise UsageError(
            f"--precision fp16 scales the loss, but {reason}", hint="use --precision bf16, or another strategy"
        )
    if config.on_nan == "skip" and (reason := why_no_scaler(strategy)) is not None:
        raise UsageError(
            f"--on-nan skip checks gradients as a GradScaler does, but {reason}",
            hint="leave it out, so that the run stops, or use another strategy",
        )
    if config.cuda_graph == "on":
        _check_cuda_graph(config, strategy, roles.count(Role.WORKER))
    if config.compile and not gpus_to_use(config):  # GPUs may be those of other hosts: there, ranks check.
        check_can_compile("cpu")
    if config.bind_to == "core":
        check_can_bind()
    wanted = {"clip": config.clip_norm is not None, "accumulate": config.accumulate > 1}
    for ability, asked in wanted.items():
        if asked and ability not in strategy.supports:
            option = {"clip": "--clip-norm", "accumulate": "--accumulate"}[ability]
            where = "" if strategy.lockstep else " in asynchronous mode"
            raise UsageError(
                f"{strategy.name} does not support {option}{where}.", hint="leave it out, or use another strategy"
            )


def _check_cuda_graph(config: RunConfig, strategy: Strategy, workers: int) -> None:
    """Raise if `--cuda-graph on` cannot be, as far as it is known before ranks start."""
    if not gpus_to_use(config):
        raise UsageError("--cuda-graph on was given, but no GPU is used.", hint="leave it out")
    reason = why_no_graph(config, strategy, workers)
    if reason is not None:
        raise UsageError(f"--cuda-graph on was given, but {reason}", hint="use --cuda-graph auto, or off")


def _check_abilities(strategy: Strategy, roles: Sequence[Role]) -> None:
    """Raise for a strategy that lacks a method which its own attributes require."""
    if Role.SERVER in roles and not isinstance(strategy, ServesParameters):
        raise UsageError(
            f"{strategy.name} makes some ranks servers, but has no method `serve`.",
            hint="write it: it serves the workers until they close",
        )
    if not strategy.lockstep and not isinstance(strategy, GivesTickets):
        raise UsageError(
            f"{strategy.name} has lockstep = False, but no method `next_ticket`.",
            hint="write it: it returns the share of the data that the rank trains next",
        )


def why_left_out_of_sets(strategy: Strategy, gpus: int) -> str | None:
    """Return a sentence on why named sets leave a strategy out, given the GPUs that ranks train on; None if not."""
    if not gpus or not isinstance(strategy, SlowOnGpus):
        return None
    name_it = "Name it in --strategies to measure it anyway."
    return f"{strategy.name} is left out on GPUs: {strategy.why_slow_on_gpus()}. {name_it}"


def left_out_of_sets(text: str, gpus: int) -> list[str]:
    """Return a sentence for each strategy that the list of strategies `text` names by a set, and that is left out."""
    by_set = [name for name in dict.fromkeys(parse_list(text)) if selected_by_set(text, name)]
    reasons = [why_left_out_of_sets(create(name), gpus) for name in by_set]
    return [reason for reason in reasons if reason is not None]


def visible_gpus(config: RunConfig) -> int:
    """Return the number of GPUs of this host that the run may use; 0 if it asks for one and there is none."""
    return 0 if config.device == "cpu" else torch.cuda.device_count()


def check_save(config: RunConfig, launcher: LauncherProcess) -> None:
    """Raise on the leader, whose host has rank 0, if the weights cannot be written to the file of `--save`."""
    if config.save and launcher.is_leader:
        check_weights_file(Path(config.save))


def check_slowed(config: RunConfig, strategy: Strategy, ranks: int) -> None:
    """Raise for a slowed rank that does not exist or does not train."""
    check_slow_ranks(config.slowed, ranks)
    roles = strategy.roles(ranks)
    for rank in config.slowed:
        if roles[rank] is not Role.WORKER:
            raise _does_not_train(rank, strategy, roles)


def _does_not_train(rank: int, strategy: Strategy, roles: Sequence[Role]) -> UsageError:
    return UsageError(
        f"--slow-rank names rank {rank}, which does not train under {strategy.name}.",
        hint=f"ranks that train: {', '.join(str(rank) for rank, role in enumerate(roles) if role is Role.WORKER)}",
    )


def gpus_to_use(config: RunConfig) -> int:
    """Return the number of GPUs of this host that the run may use."""
    gpus = visible_gpus(config)
    if config.device == "cuda" and not gpus:
        raise UsageError("--device cuda was given, but torch sees no GPU.", hint="use --device cpu, or leave it out")
    return gpus
