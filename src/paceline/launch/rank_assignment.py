"""Who starts which ranks: where this process sits in its launch, and the parts of a job. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.config import LaunchConfig
from paceline.errors import LaunchError, UsageError
from paceline.launch.launcher_process import LauncherInfo, LauncherProcess, RankRange, Shape
from paceline.launch.slurm.step import launcher_from_slurm

_TORCHRUNS = "torchrun sets it; where nothing like it has started this, unset RANK and WORLD_SIZE"


def find_launcher_process(launch: LaunchConfig, environment: Mapping[str, str]) -> LauncherProcess:
    """Where this process sits: torchrun's or Slurm's word, or the user's."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _launcher_from_torchrun(launch, environment)
    slurm = launcher_from_slurm(environment, launch)
    if slurm is not None:
        return slurm
    if launch.hosts > 1 and launch.master is None:
        raise UsageError(
            f"--hosts {launch.hosts} was given without --master.",
            hint="name host 0 and a free port on it, as --master 198.18.0.1:29500",
        )
    return LauncherProcess(number=launch.node_rank, launchers=launch.hosts, node=launch.node_rank, master=launch.master)


def assign_ranks(shape: Shape, launcher: LauncherProcess, infos: Sequence[LauncherInfo]) -> list[RankRange]:
    """Who starts which ranks: those of one host stand together, whatever the order of the seats."""
    nodes: dict[int, list[LauncherInfo]] = {}
    for info in infos:
        nodes.setdefault(info.node, []).append(info)
    if shape.hosts > len(nodes):
        raise UsageError(f"{shape.hosts} hosts are asked for, but there are {len(nodes)}.")
    chosen = list(nodes.values())[: shape.hosts]
    if launcher.ranks is None:
        starters = [(infos[0], 0) for infos in chosen]
    else:
        starters = [(info, local) for infos in chosen for local, info in enumerate(infos[: shape.ranks_per_host])]
    if len(starters) * (launcher.ranks or shape.ranks_per_host) != shape.ranks:
        raise UsageError(
            f"{shape.ranks_per_host} ranks on each of {shape.hosts} hosts are asked for, but there are not as many.",
            hint="a run needs as many ranks on every host",
        )
    return [
        RankRange(
            launcher=info.launcher,
            number=number,
            rank_ranges=len(starters),
            ranks=launcher.ranks or shape.ranks_per_host,
            local_rank=local,
            local_size=shape.ranks_per_host,
            sharing=_sharing(info, [other for other, _ in starters], launcher.ranks or shape.ranks_per_host),
        )
        for number, (info, local) in enumerate(starters)
    ]


def _sharing(info: LauncherInfo, starters: Sequence[LauncherInfo], ranks: int) -> int:
    """Ranks on the same cores: Slurm may bind each to its own, torchrun leaves all to all."""
    return ranks * sum(other.node == info.node and other.cores == info.cores for other in starters)


def _launcher_from_torchrun(launch: LaunchConfig, environment: Mapping[str, str]) -> LauncherProcess:
    size = _number_from(environment, "WORLD_SIZE", least=1)
    local_size = _number_from(environment, "LOCAL_WORLD_SIZE", default=size, least=1)
    number = _number_from(environment, "RANK")
    if number >= size:
        raise LaunchError(f"RANK is {number}, but WORLD_SIZE is {size}.", hint=_TORCHRUNS)
    if launch.hosts > 1 or launch.ranks not in (None, size) or launch.ranks_per_host not in (None, local_size):
        asked = next(
            f"--{name.replace('_', '-')} {getattr(launch, name)}"
            for name in ("hosts", "ranks", "ranks_per_host")
            if getattr(launch, name) not in (None, 1)
        )
        raise UsageError(
            f"{asked} was given, but the launcher started {size} ranks, {local_size} on this host.",
            hint="leave it out under torchrun, and set its --nnodes and --nproc-per-node",
        )
    return LauncherProcess(
        number=number,
        launchers=size,
        ranks=1,
        node=_number_from(environment, "GROUP_RANK", default=0),
        local_rank=_number_from(environment, "LOCAL_RANK", default=number),
        local_size=local_size,
        started_by="torchrun",
    )


def _number_from(environment: Mapping[str, str], name: str, *, default: int = 0, least: int = 0) -> int:
    """A number that torchrun sets, or whoever does as it does."""
    text = environment.get(name, str(default))
    if not text.isdecimal() or int(text) < least:
        raise LaunchError(f"{name} should be a number of {least} or more, but it is {text!r}.", hint=_TORCHRUNS)
    return int(text)
