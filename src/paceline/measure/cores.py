"""Cores that this process may use, given CPU affinity and cgroup quotas (v1 and v2). Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.config.emulation import emulation_info
from paceline.measure.cgroups import CGROUP_ROOT, SELF_CGROUP, cgroup_folders


def usable_cores() -> float:
    """Return the cores that this process may use; 0.5 in a container limited to half a core on a 64-core machine.

    On an emulated host with a share of the cores, this is that share. The process that launches the host's ranks gets
    the same answer, although the share does not limit it.
    """
    emulation = emulation_info(os.environ)
    limits = [cgroup_quota(SELF_CGROUP, CGROUP_ROOT), None if emulation is None else emulation.host_cpus]
    return min([float(affine_cores()), *[limit for limit in limits if limit is not None]])


def affine_cores() -> int:
    """Return the number of cores in this process's CPU affinity, ignoring quotas."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(ranks_on_host: int, cores: float | None = None) -> int:
    """Return the compute threads per rank at which the ranks of a host do not compete for its usable cores.

    Emulated hosts without a fixed share divide the cores of one machine equally, even if not all of them participate.
    """
    return max(1, int(_host_cores() if cores is None else cores) // ranks_on_host)


def core_share(ranks_on_host: int, threads: int) -> float:
    """Return the share of a core (at most 1) that each thread has while all ranks of the host compute."""
    return min(1.0, _host_cores() / (ranks_on_host * threads))


def _host_cores() -> float:
    """Return the cores of this host alone: an equal share on emulated hosts without a fixed one."""
    emulation = emulation_info(os.environ)
    return usable_cores() / (emulation.hosts if emulation is not None and emulation.host_cpus is None else 1)


def cgroup_quota(self_cgroup: Path, root: Path) -> float | None:
    """Return the lowest CPU quota from this process's cgroup up to the root, in cores; None if there is no quota."""
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
