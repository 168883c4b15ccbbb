"""CPU limits of emulated hosts: a cgroup (v1 or v2) with a CPU quota for the ranks of each host."""

from __future__ import annotations

import errno
import itertools
import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.errors import LaunchError
from paceline.formatting import format_cores
from paceline.measure.cgroups import CGROUP_ROOT, SELF_CGROUP

PERIOD_US = 10_000
"""Shortest period with an accurate quota at a scheduler tick of 4 ms.

Measured with a quota of 0.5 cores: 0.35 cores with a period of 2 ms, 0.46 with 5 ms, 0.501 with 10 ms, 0.501 with 20 ms
and 0.509 with 100 ms. A computation of 9 ms took (10th to 90th percentile) 13 to 23 ms with a period of 10 ms, 9 to 22
with 20 ms, 9 to 37 with 50 ms and 9 to 58 with 100 ms. With long periods, some steps are never throttled and others
nearly always."""
_MIN_QUOTA_US = 1_000
"""Smallest quota that the kernel accepts."""
_MAX_PERIOD_US = 1_000_000
_REMOVE_S = 3.0
_NAME = re.compile(r"paceline-(?P<namespace>\d+)-(?P<pid>\d+)-(?P<start>\d+)-\d+-host\d+")
_emulations = itertools.count()


@contextmanager
def host_cgroups(
    hosts: int, cpus: float, *, self_cgroup: Path = SELF_CGROUP, root: Path = CGROUP_ROOT
) -> Iterator[list[Path]]:
    """Create a cgroup per host, limited to `cpus` cores, for the duration of a `with` block; yield their folders.

    Also remove the cgroups of emulations that were killed. The name of a cgroup contains the process that created it
    and the start time of that process.
    """
    parent = find_parent_cgroup(self_cgroup, root)
    remove_stale(parent)
    folders: list[Path] = []
    name = f"paceline-{_owner(os.getpid())}-{next(_emulations)}"
    try:
        for host in range(hosts):
            folder = parent / f"{name}-host{host}"
            folder.mkdir()
            folders.append(folder)
            _set_quota(folder, cpus)
        yield folders
    except OSError as error:
        if error.filename is None or not str(error.filename).startswith(str(parent)):
            raise
        raise _cgroup_error(error, parent, cpus) from None
    finally:
        for folder in folders:
            _remove(folder, time.monotonic() + _REMOVE_S)


def enter(folder: Path) -> None:
    """Move this process, and all processes that it will start, into a cgroup."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def quota_and_period_us(cpus: float) -> tuple[int, int]:
    """Return the quota and the period for a number of cores; small numbers need a period longer than `PERIOD_US`."""
    period = min(max(PERIOD_US, math.ceil(_MIN_QUOTA_US / cpus)), _MAX_PERIOD_US)
    return round(cpus * period), period


def remove_stale(parent: Path) -> None:
    """Remove the cgroups of emulations whose process has ended."""
    for folder in parent.glob("paceline-*-host*"):
        match = _NAME.fullmatch(folder.name)
        if match is None or match["namespace"] != _pid_namespace():
            continue
        if _start_ticks(int(match["pid"])) != match["start"]:
            _remove(folder, time.monotonic() + _REMOVE_S)


def _remove(folder: Path, deadline: float) -> None:
    """Remove a cgroup when its processes, which are stopping, have ended; after the deadline, leave it for later."""
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                return
            time.sleep(0.02)
        else:
            return


def _set_quota(folder: Path, cpus: float) -> None:
    quota, period = quota_and_period_us(cpus)
    if (folder.parent / "cgroup.subtree_control").exists():
        (folder / "cpu.max").write_text(f"{quota} {period}")
    else:
        (folder / "cpu.cfs_period_us").write_text(str(period))
        (folder / "cpu.cfs_quota_us").write_text(str(quota))


def find_parent_cgroup(self_cgroup: Path, root: Path) -> Path:
    """Return the cgroup in which to create new ones.

    With v1 this is the cgroup of this process. With v2 it is the root, since a cgroup with processes cannot have
    children with limits.
    """
    with suppress(OSError):
        for line in self_cgroup.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if "cpu" not in controllers.split(","):
                continue
            mounts = [mount for name in (controllers, "cpu") if (mount := root / name).is_dir()]
            own = [folder for mount in mounts if (folder := mount / group.lstrip("/")).is_dir()]
            if mounts:
                return (own or mounts)[0]
    control = root / "cgroup.subtree_control"
    try:
        if "cpu" not in control.read_text().split():
            control.write_text("+cpu")
    except OSError as error:
        raise _cgroup_error(error, root, None) from None
    return root


def _cgroup_error(error: OSError, parent: Path, cpus: float | None) -> LaunchError:
    hints = {
        errno.EPERM: "only root can limit cores: run the command with sudo, or remove --host-cpus",
        errno.EACCES: "only root can limit cores: run the command with sudo, or remove --host-cpus",
        errno.EROFS: "in a container, start the container with --privileged; otherwise remove --host-cpus",
        errno.ENOENT: "mount the cgroup file system with its cpu controller, or remove --host-cpus",
        errno.EINVAL: f"{parent} may have a lower limit: use a smaller --host-cpus",
        errno.EBUSY: f"{parent} contains processes, as in a container: move them to a cgroup below it, "
        "or remove --host-cpus",
    }
    limit = "" if cpus is None else f" to {format_cores(cpus)}"
    return LaunchError(
        f"cannot limit emulated hosts{limit}: {error.filename or parent}: {error.strerror}.",
        hint=hints.get(error.errno or 0, "remove --host-cpus"),
    )


def _owner(pid: int) -> str:
    return f"{_pid_namespace()}-{pid}-{_start_ticks(pid)}"


def _pid_namespace() -> str:
    """Return the ID of the PID namespace: containers on one machine may see each other's cgroups, but not PIDs."""
    return re.sub(r"\D", "", str(Path("/proc/self/ns/pid").readlink()))


def _start_ticks(pid: int) -> str | None:
    """Return the start time of a process, in ticks since boot, to detect a reused PID; None if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
