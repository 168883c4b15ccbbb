"""Assignment of ranks to launchers, and the position of this launcher process among them. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.config import LaunchConfig
from paceline.config.whole_number import whole_number
from paceline.errors import LaunchError, UsageError
from paceline.launch.launcher_process import LauncherInfo, LauncherProcess, RankRange, Shape
from paceline.launch.slurm.step import launcher_from_slurm

_TORCHRUN_HINT = "torchrun sets this variable; if torchrun did not start this process, unset RANK and WORLD_SIZE"


def find_launcher_process(launch: LaunchConfig, environment: Mapping[str, str]) -> LauncherProcess:
    """Return the position of this process, from torchrun's or Slurm's variables, otherwise from the options."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _launcher_from_torchrun(launch, environment)
    slurm = launcher_from_slurm(environment, launch)
    if slurm is not None:
        return slurm
    if launch.hosts > 1 and launch.master is None:
        raise UsageError(
            f"--hosts {launch.hosts} was given without --master.",
            hint="give the address of host 0 and a free port on it, for example --master 198.18.0.1:29500",
        )
    return LauncherProcess(number=launch.node_rank, launchers=launch.hosts, node=launch.node_rank, master=launch.master)


def assign_ranks(shape: Shape, launcher: LauncherProcess, launcher_infos: Sequence[LauncherInfo]) -> list[RankRange]:
    """Return the ranks that each launcher starts. Ranks of one host are consecutive, in any order of launchers.

    Raise `UsageError` if the shape needs more hosts or ranks than there are.
    """
    nodes: dict[int, list[LauncherInfo]] = {}
    for launcher_info in launcher_infos:
        nodes.setdefault(launcher_info.node, []).append(launcher_info)
    if shape.hosts > len(nodes):
        raise UsageError(
            f"the run needs {shape.hosts} hosts, but the launch has {len(nodes)}.",
            hint="start the command on more hosts, or reduce the number of hosts",
        )
    chosen = list(nodes.values())[: shape.hosts]
    if launcher.ranks is None:
        starters = [(on_host[0], 0) for on_host in chosen]
    else:
        starters = [
            (launcher_info, local_rank)
            for on_host in chosen
            for local_rank, launcher_info in enumerate(on_host[: shape.ranks_per_host])
        ]
    ranks = launcher.ranks or shape.ranks_per_host
    if len(starters) * ranks != shape.ranks:
        raise UsageError(
            f"the run needs {shape.ranks_per_host} ranks on each of {shape.hosts} hosts, but the launch has fewer.",
            hint="start the same number of ranks on every host",
        )
    return [
        RankRange(
            launcher=launcher_info.launcher,
            group_rank=group_rank,
            group_world_size=len(starters),
            ranks=ranks,
            local_rank=local_rank,
            local_size=shape.ranks_per_host,
            ranks_on_cores=_ranks_on_cores(launcher_info, [other for other, _ in starters], ranks),
        )
        for group_rank, (launcher_info, local_rank) in enumerate(starters)
    ]


def _ranks_on_cores(launcher_info: LauncherInfo, starters: Sequence[LauncherInfo], ranks: int) -> int:
    """Return the number of ranks on a launcher's cores: Slurm may bind each rank to cores, torchrun does not."""
    same = [other.node == launcher_info.node and other.cores == launcher_info.cores for other in starters]
    return ranks * sum(same)


def _launcher_from_torchrun(launch: LaunchConfig, environment: Mapping[str, str]) -> LauncherProcess:
    size = _read_number(environment, "WORLD_SIZE", minimum=1)
    local_size = _read_number(environment, "LOCAL_WORLD_SIZE", default=size, minimum=1)
    number = _read_number(environment, "RANK")
    if number >= size:
        raise LaunchError(f"RANK is {number}, but WORLD_SIZE is {size}.", hint=_TORCHRUN_HINT)
    if launch.hosts > 1 or launch.ranks not in (None, size) or launch.ranks_per_host not in (None, local_size):
        option = next(
            f"--{name.replace('_', '-')} {getattr(launch, name)}"
            for name in ("hosts", "ranks", "ranks_per_host")
            if getattr(launch, name) not in (None, 1)
        )
        raise UsageError(
            f"{option} was given, but torchrun started {size} ranks, {local_size} on this host.",
            hint="remove the option under torchrun, and set torchrun's --nnodes and --nproc-per-node instead",
        )
    return LauncherProcess(
        number=number,
        launchers=size,
        ranks=1,
        node=_read_number(environment, "GROUP_RANK", default=0),
        local_rank=_read_number(environment, "LOCAL_RANK", default=number),
        local_size=local_size,
        started_by="torchrun",
    )


def _read_number(environment: Mapping[str, str], name: str, *, default: int = 0, minimum: int = 0) -> int:
    """Return a number from an environment variable that torchrun sets. Raise `LaunchError` if it is invalid."""
    text = environment.get(name, str(default))
    number = whole_number(text)
    if number is None or number < minimum:
        raise LaunchError(f"{name} must be an integer of at least {minimum}, but it is {text!r}.", hint=_TORCHRUN_HINT)
    return number
