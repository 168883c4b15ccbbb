"""How many cores this process may really use: CPU affinity and cgroup quotas (v1 and v2). Free of torch."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
SELF_CGROUP = Path("/proc/self/cgroup")


def usable_cores() -> float:
    """Cores the scheduler lets us have; a container limited to half a core on a 64-core machine has 0.5."""
    affinity = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    quota = cgroup_quota(SELF_CGROUP, CGROUP_ROOT)
    return affinity if quota is None else min(affinity, quota)


def threads_per_rank(ranks_on_host: int) -> int:
    """Threads each rank computes with, so that the ranks of a host do not fight over its cores."""
    return max(1, int(usable_cores()) // ranks_on_host)


def cgroup_quota(self_cgroup: Path, root: Path) -> float | None:
    """The tightest CPU quota from our cgroup up to the root, in cores; None when there is none."""
    try:
        lines = self_cgroup.read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = [root] if not controllers else [root / controllers, root / "cpu"]
        quotas += [quota for mount in mounts for quota in _quotas_upwards(mount, group.lstrip("/"))]
    return min(quotas, default=None)


def _quotas_upwards(mount: Path, group: str) -> list[float]:
    folder, quotas = mount / group, []
    while folder == mount or mount in folder.parents:
        quota = _quota_in(folder)
        if quota is not None:
            quotas.append(quota)
        folder = folder.parent
    return quotas


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
