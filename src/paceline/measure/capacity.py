"""Memory and disk space that this process may use, given cgroup limits (v1 and v2). Imports no torch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from paceline.measure.cgroups import CGROUP_ROOT, SELF_CGROUP, cgroup_folders

UNLIMITED = 1 << 60
"""Limits from here on mean "no limit": cgroup v1 writes the largest number of whole pages."""


class MemoryLimit(NamedTuple):
    """Memory limit of a cgroup, and the memory of its processes that the kernel cannot reclaim."""

    limit_bytes: int
    used_bytes: int


def memory_limits(self_cgroup: Path = SELF_CGROUP, root: Path = CGROUP_ROOT) -> list[MemoryLimit]:
    """Return the memory limits that apply to this process, from its own cgroup up to the root."""
    found = [_limit_in(folder) for folder in cgroup_folders("memory", self_cgroup, root)]
    return [limit for limit in found if limit is not None]


def available_memory_bytes(limits: list[MemoryLimit], free_bytes: int) -> int:
    """Return the bytes that may still be allocated: the machine's free memory, or less under a cgroup limit."""
    return max(0, min([free_bytes, *[limit.limit_bytes - limit.used_bytes for limit in limits]]))


def free_disk_bytes(folder: Path) -> int:
    """Return the free bytes of a folder's file system; quotas are not considered."""
    return shutil.disk_usage(folder).free


def _limit_in(folder: Path) -> MemoryLimit | None:
    v2 = (folder / "memory.max").is_file()
    limit = _number(folder / ("memory.max" if v2 else "memory.limit_in_bytes"))
    if limit is None or limit >= UNLIMITED:
        return None
    used = _number(folder / ("memory.current" if v2 else "memory.usage_in_bytes")) or 0
    return MemoryLimit(limit, max(0, used - _file_cache(folder, "inactive_file" if v2 else "total_inactive_file")))


def _file_cache(folder: Path, name: str) -> int:
    """Return the size of the inactive page cache, which counts as used but is reclaimed on demand."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        return sum(int(value) for key, value in (line.split() for line in lines) if key == name)
    except (OSError, ValueError):
        return 0


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # ValueError: v2 writes "max".
        return None
