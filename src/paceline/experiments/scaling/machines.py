"""What the hosts of a scaling experiment really are: those that share a machine share its cores, and get threads so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from paceline.analysis.scaling.machines import max_ranks_sharing_cores
from paceline.config import LaunchConfig
from paceline.launch.launcher_process import LauncherInfo, Shape
from paceline.measure.cgroups import CGROUP_ROOT, SELF_CGROUP
from paceline.measure.cores import affine_cores, cgroup_quota


@dataclass(frozen=True)
class ThreadCounts:
    """Threads that ranks compute with; None for the usual rule, a host's cores ÷ its ranks."""

    rank: int | None
    single: int | None
    """Of the one process that the others are held against: it has what a host has."""


def own_quota() -> float | None:
    """The cores that a quota leaves this process; None where there is none."""
    return cgroup_quota(SELF_CGROUP, CGROUP_ROOT)


def machine_cores() -> float:
    """The cores of the machine that we may use, whatever share an emulated host has of them."""
    quota = own_quota()
    return float(affine_cores()) if quota is None else min(float(affine_cores()), quota)


def find_machines(infos: Sequence[LauncherInfo], *, emulated: bool, quota: float | None) -> list[int]:
    """For each host, in order, the number of its machine: hosts that may use the same cores are on one.

    Containers of one machine that have a network each and a quota of the cores are held to be machines of their own.
    """
    nodes: dict[int, list[LauncherInfo]] = {}
    for info in infos:
        nodes.setdefault(info.node, []).append(info)
    machines: list[list[LauncherInfo]] = []
    found = []
    for own in nodes.values():
        apart = quota is not None and not emulated
        known = [other for other in machines if any(_share(a, b, apart=apart) for a in own for b in other)]
        if not known:
            machines.append([])
        machine = known[0] if known else machines[-1]
        machine += own
        found.append(next(number for number, other in enumerate(machines) if other is machine))
    return found


def are_bound(infos: Sequence[LauncherInfo]) -> bool:
    """Whether a launcher that starts a process per rank, as Slurm, gave each of a host cores of its own."""
    pairs = [(a, b) for a, b in combinations(infos, 2) if a.node == b.node]
    return bool(pairs) and not any(_share(one, other, apart=False) for one, other in pairs)


def _share(one: LauncherInfo, other: LauncherInfo, *, apart: bool) -> bool:
    """Whether two may use the same cores of the same machine; `apart` are those whose networks differ."""
    if apart and one.network != other.network:
        return False
    same_cores = not one.cores or not other.cores or bool(set(one.cores) & set(other.cores))
    return one.network.split()[0] == other.network.split()[0] and same_cores


def choose_threads(shapes: Sequence[Shape], launch: LaunchConfig, place: Mapping[str, Any], gpus: int) -> ThreadCounts:
    """As the user said; else, where all ranks share one machine, the same for all, so that more ranks have more cores.

    Hosts and ranks with cores of their own, or a share of the machine's, follow the usual rule.
    """
    hosts = len(place["machines"])
    on_each = max(place["machines"].count(machine) for machine in place["machines"])
    usual = place["ranks_pinned"] or (hosts > 1 and on_each == 1)
    if launch.threads is not None or gpus or usual or place["host_cpus"] is not None:
        return ThreadCounts(launch.threads, launch.threads)
    cores = max(1, int(place["machine_cores"]))
    most = min(cores, max(max_ranks_sharing_cores(place, shape.hosts, shape.ranks_per_host) for shape in shapes))
    return ThreadCounts(cores // most, max(1, cores // on_each))
