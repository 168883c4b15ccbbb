"""Finds the cgroups that limit this process, of both versions, from its own up to the root. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
SELF_CGROUP = Path("/proc/self/cgroup")


def cgroup_folders(controller: str, self_cgroup: Path, root: Path) -> Iterator[Path]:
    """The folders whose limits hold for us, innermost first; some may not be there, as seen from a container."""
    try:
        lines = self_cgroup.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mounts = [root] if not controllers else [root / controllers, root / controller]
        for mount in dict.fromkeys(mounts):
            folder = mount / group.lstrip("/")
            while folder == mount or mount in folder.parents:
                yield folder
                folder = folder.parent
