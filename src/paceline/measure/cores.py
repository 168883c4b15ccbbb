"""How many cores this process may really use: CPU affinity and cgroup quotas (v1 and v2). Free of torch."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.config.emulation import emulation_info
from paceline.measure.cgroups import CGROUP_ROOT, SELF_CGROUP, cgroup_folders


def usable_cores() -> float:
    """Cores the scheduler lets us have; a container limited to half a core on a 64-core machine has 0.5.

    On an emulated host with a share of the cores it is that share, also in the process that launches its ranks, which
    the share does not hold for.
    """
    place = emulation_info(os.environ)
    limits = [cgroup_quota(SELF_CGROUP, CGROUP_ROOT), None if place is None else place.host_cpus]
    return min([float(affine_cores()), *[limit for limit in limits if limit is not None]])


def affine_cores() -> int:
    """Cores that the affinity of this process leaves it, whatever a quota says."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(ranks_on_host: int, cores: float | None = None) -> int:
    """Threads each rank computes with, so that the ranks of a host do not fight over its cores: those we may use.

    Emulated hosts without a share of their own have the cores of one machine together, whether all of them take part or
    not: one of them gets what one gets when they all do.
    """
    return max(1, int(_host_cores() if cores is None else cores) // ranks_on_host)


def core_share(ranks_on_host: int, threads: int) -> float:
    """The part of a core that each thread has while all ranks of the host compute: 1 at most."""
    return min(1.0, _host_cores() / (ranks_on_host * threads))


def _host_cores() -> float:
    """Cores that this host has to itself."""
    place = emulation_info(os.environ)
    return usable_cores() / (place.hosts if place is not None and place.host_cpus is None else 1)


def cgroup_quota(self_cgroup: Path, root: Path) -> float | None:
    """The tightest CPU quota from our cgroup up to the root, in cores; None when there is none."""
    quotas = [_quota_in(folder) for folder in cgroup_folders("cpu", self_cgroup, root)]
    return min([quota for quota in quotas if quota is not None], default=None)


def _quota_in(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").is_file():
            limit, period = (folder / "cpu.max").read_text().split()
        else:
            limit = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
    except (OSError, ValueError):
        return None
    return None if limit in ("max", "-1") else int(limit) / int(period)
