"""Detect hosts that share a machine, and choose threads per rank accordingly."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from paceline.analysis.scaling.machines import MachineLayout, max_ranks_sharing_cores
from paceline.config import LaunchConfig
from paceline.config.emulation import emulation_info
from paceline.launch.launcher_process import LauncherInfo, Shape
from paceline.measure.cgroups import CGROUP_ROOT, SELF_CGROUP
from paceline.measure.cores import affine_cores, cgroup_quota


@dataclass(frozen=True)
class ThreadCounts:
    """Threads per rank; None for the usual rule, a host's cores ÷ its ranks."""

    rank: int | None
    single: int | None
    """Threads of the baseline, one process that uses a whole host."""


@dataclass(frozen=True, kw_only=True)
class DetectedMachines:
    """Machines and cores of the hosts of a launch, as in `PointsDesign`."""

    emulated: str | None
    host_cpus: float | None
    machine_cores: float
    machines: list[int]
    ranks_pinned: bool


def own_quota() -> float | None:
    """Return the cores that a cgroup quota allows this process; None without a quota."""
    return cgroup_quota(SELF_CGROUP, CGROUP_ROOT)


def machine_cores() -> float:
    """Return the cores of this machine that may be used, whatever share an emulated host has."""
    quota = own_quota()
    return float(affine_cores()) if quota is None else min(float(affine_cores()), quota)


def detect_machines(infos: Sequence[LauncherInfo]) -> DetectedMachines:
    """Return the machines and cores of the hosts of a launch."""
    emulation = emulation_info(os.environ)
    return DetectedMachines(
        emulated=None if emulation is None else emulation.spec,
        host_cpus=None if emulation is None else emulation.host_cpus,
        machine_cores=machine_cores(),
        machines=find_machines(infos, emulated=emulation is not None, quota=own_quota()),
        ranks_pinned=are_bound(infos),
    )


def find_machines(infos: Sequence[LauncherInfo], *, emulated: bool, quota: float | None) -> list[int]:
    """Return the machine number of each host: hosts that may use the same cores are one machine.

    Containers with separate networks and a CPU quota count as separate machines.
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
    """Whether a launcher that starts a process per rank, such as Slurm, bound each rank to separate cores."""
    pairs = [(a, b) for a, b in combinations(infos, 2) if a.node == b.node]
    return bool(pairs) and not any(_share(one, other, apart=False) for one, other in pairs)


def _share(one: LauncherInfo, other: LauncherInfo, *, apart: bool) -> bool:
    """Whether two processes may use the same cores; with `apart`, processes in different networks never do."""
    if apart and one.network != other.network:
        return False
    same_cores = not one.cores or not other.cores or bool(set(one.cores) & set(other.cores))
    return one.network.split()[0] == other.network.split()[0] and same_cores


def choose_threads(shapes: Sequence[Shape], launch: LaunchConfig, place: MachineLayout, gpus: int) -> ThreadCounts:
    """Return the threads given by the user; else, if all ranks share one machine, the same for every world size.

    So more ranks use more cores. Hosts and ranks with separate cores, or a CPU share, follow the usual rule.
    """
    hosts = len(place.machines)
    on_each = max(place.machines.count(machine) for machine in place.machines)
    usual = place.ranks_pinned or (hosts > 1 and on_each == 1)
    if launch.threads is not None or gpus or usual or place.host_cpus is not None:
        return ThreadCounts(launch.threads, launch.threads)
    cores = max(1, int(place.machine_cores))
    most = min(cores, max(max_ranks_sharing_cores(place, shape.hosts, shape.ranks_per_host) for shape in shapes))
    return ThreadCounts(cores // most, max(1, cores // on_each))
