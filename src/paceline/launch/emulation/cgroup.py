"""A share of the machine's cores for each emulated host: a cgroup with a CPU quota (v1 and v2) for its ranks."""

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
from paceline.measure.cgroups import CGROUP_ROOT, SELF_CGROUP

PERIOD_US = 10_000
"""The shortest that keeps a share exact with a scheduler's tick of 4 ms. Half a core, by period: 2 ms 0.35 cores, 5 ms
0.46, 10 ms 0.501, 20 ms 0.501, 100 ms 0.509. A piece of work of 9 ms then takes (10th to 90th of 100) 13 to 23 ms with
10 ms, 9 to 22 with 20, 9 to 37 with 50, and 9 to 58 with 100 ms: long ones make steps that never wait, and others that
do little else."""
_LEAST_QUOTA_US = 1_000
"""The kernel takes no smaller one."""
_LONGEST_PERIOD_US = 1_000_000
_EMPTIES_S = 3.0
_NAME = re.compile(r"paceline-(?P<namespace>\d+)-(?P<pid>\d+)-(?P<start>\d+)-\d+-host\d+")
_emulation = itertools.count()


@contextmanager
def cpu_shares(
    hosts: int, cpus: float, *, self_cgroup: Path = SELF_CGROUP, root: Path = CGROUP_ROOT
) -> Iterator[list[Path]]:
    """Makes a cgroup per host, whose processes have `cpus` cores together; takes them away again.

    What an emulation that was killed has left is taken away too: its name says which process made it, and when that
    started.
    """
    parent = _parent(self_cgroup, root)
    remove_stale(parent)
    folders: list[Path] = []
    name = f"paceline-{_owner(os.getpid())}-{next(_emulation)}"
    try:
        for host in range(hosts):
            folder = parent / f"{name}-host{host}"
            folder.mkdir()
            folders.append(folder)
            _limit(folder, cpus)
        yield folders
    except OSError as error:
        if error.filename is None or not str(error.filename).startswith(str(parent)):
            raise
        raise _refusal(error, parent, cpus) from None
    finally:
        for folder in folders:
            _remove(folder, time.monotonic() + _EMPTIES_S)


def enter(folder: Path) -> None:
    """Moves this process, and with it all that it will start, into a cgroup."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def quota_and_period_us(cpus: float) -> tuple[int, int]:
    """The quota in each period that makes a share: in short periods, but for shares too small for one."""
    period = min(max(PERIOD_US, math.ceil(_LEAST_QUOTA_US / cpus)), _LONGEST_PERIOD_US)
    return round(cpus * period), period


def remove_stale(parent: Path) -> None:
    """Removes the cgroups of emulations whose process is gone; those of living ones stay."""
    for folder in parent.glob("paceline-*-host*"):
        match = _NAME.fullmatch(folder.name)
        if match is None or match["namespace"] != _pid_namespace():
            continue
        if _started(int(match["pid"])) != match["start"]:
            _remove(folder, time.monotonic() + _EMPTIES_S)


def _remove(folder: Path, deadline: float) -> None:
    """Removes a cgroup once its processes, which are about to end, have ended; else leaves it to the next start."""
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


def _limit(folder: Path, cpus: float) -> None:
    quota, period = quota_and_period_us(cpus)
    if (folder.parent / "cgroup.subtree_control").exists():
        (folder / "cpu.max").write_text(f"{quota} {period}")
    else:
        (folder / "cpu.cfs_period_us").write_text(str(period))
        (folder / "cpu.cfs_quota_us").write_text(str(quota))


def _parent(self_cgroup: Path, root: Path) -> Path:
    """The group to make ours in: with v1 our own; with v2, where a group with processes has none in it, the top."""
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
        raise _refusal(error, root, None) from None
    return root


def _refusal(error: OSError, parent: Path, cpus: float | None) -> LaunchError:
    hints = {
        errno.EPERM: "only root may share the cores out: run it with sudo, or leave --host-cpus out",
        errno.EACCES: "only root may share the cores out: run it with sudo, or leave --host-cpus out",
        errno.EROFS: "in a container, start that with --privileged; or leave --host-cpus out",
        errno.ENOENT: "mount the cgroup file system with its cpu controller, or leave --host-cpus out",
        errno.EINVAL: f"{parent} itself may have less than that: ask for a smaller share",
        errno.EBUSY: f"processes in {parent} itself are in the way, as in a container: move them to a group below it, "
        "or leave --host-cpus out",
    }
    asked = "" if cpus is None else f" of {cpus:g} cores"
    return LaunchError(
        f"the kernel gives emulated hosts no share{asked}: {error.filename or parent}: {error.strerror}.",
        hint=hints.get(error.errno or 0, "leave --host-cpus out"),
    )


def _owner(pid: int) -> str:
    return f"{_pid_namespace()}-{pid}-{_started(pid)}"


def _pid_namespace() -> str:
    """Where numbers of processes mean what they mean to us: containers on one machine may see each other's cgroups."""
    return re.sub(r"\D", "", str(Path("/proc/self/ns/pid").readlink()))


def _started(pid: int) -> str | None:
    """When a process started, in ticks since the boot: tells it from a later one with the same number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
