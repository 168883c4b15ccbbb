"""Find the cgroups (v1 and v2) that limit this process, from its own up to the root. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
SELF_CGROUP = Path("/proc/self/cgroup")


def cgroup_folders(controller: str, self_cgroup: Path, root: Path) -> Iterator[Path]:
    """Yield the folders whose limits apply to this process, innermost first. In a container some may not exist."""
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
