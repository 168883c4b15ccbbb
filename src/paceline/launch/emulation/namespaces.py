"""Unnamed Linux namespaces for emulated hosts: the kernel removes them when the process that created them ends."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_BIND, _MS_REC, _MS_SLAVE = 0x1000, 0x4000, 0x80000
_ENTER = Path(__file__).with_name("enter.py")
_HOSTS_FILE = Path("/etc/hosts")
_DISABLE_IPV6 = Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")


@dataclass(frozen=True)
class Namespace:
    """Network, host name, and mounts with an /etc/hosts file that has the names of all hosts.

    Descriptors of this process keep them alive. The kernel removes the network when this process and all programs that
    it started in the namespace have ended.
    """

    name: str
    descriptors: Mapping[str, int]
    """File descriptors by kind of namespace, named as in /proc."""

    @property
    def net(self) -> int:
        """Descriptor of the network namespace."""
        return self.descriptors["net"]

    def popen(self, *command: str, pass_fds: Sequence[int] = (), **options: Any) -> subprocess.Popen[Any]:
        """Start a program in the namespace; the kernel kills it when the calling thread ends."""
        held = list(self.descriptors.values())
        enter = [sys.executable, "-I", "-S", str(_ENTER), str(os.getpid()), ",".join(map(str, held)), "--"]
        return subprocess.Popen([*enter, *command], pass_fds=(*held, *pass_fds), **options)

    def run(self, *command: str, input: str | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program in the namespace; return its exit code and output."""
        stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
        pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with self.popen(*command, **(pipes | options)) as process:
            try:
                out, err = process.communicate(input)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in self.descriptors.values():
            os.close(descriptor)


def new_namespace(name: str, addresses: Mapping[str, str]) -> Namespace:
    """Create the namespaces of a host called `name`; `addresses` maps host names to addresses.

    A namespace belongs to a thread. A temporary thread creates it, so that the other threads of this process keep
    theirs. Raise `LaunchError` if this process lacks the permission.
    """
    created: list[Namespace | OSError] = []

    def create() -> None:
        try:
            created.append(_create_namespace(name, addresses))
        except OSError as error:
            created.append(error)

    thread = threading.Thread(target=create)
    thread.start()
    thread.join()
    (result,) = created
    if isinstance(result, Namespace):
        return result
    if result.errno in (errno.EPERM, errno.EACCES):
        raise permission_error()
    raise LaunchError(
        f"the kernel could not create a network for an emulated host: {result.strerror}.",
        hint="use --ranks without --emulate, or another machine",
    )


def permission_error() -> LaunchError:
    """Return the error for a user without the permission to create networks."""
    return LaunchError(
        "emulated hosts have separate networks, which only root can create.",
        hint="run the command with sudo, or as `unshare --map-root-user paceline …` if the system allows that; "
        "start a container with --cap-add NET_ADMIN --cap-add SYS_ADMIN",
    )


def _create_namespace(name: str, addresses: Mapping[str, str]) -> Namespace:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET | _CLONE_NEWUTS | _CLONE_NEWNS) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    socket.sethostname(name)
    with suppress(OSError):  # The kernel may have no IPv6. Its neighbour discovery would count as traffic.
        _DISABLE_IPV6.write_text("1")
    _mount_hosts_file(libc, addresses)
    opened = {
        kind: os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("net", "uts", "mnt")
    }
    before = Path("/").stat()
    if libc.setns(opened["mnt"], 0) != 0 or not os.path.samestat(before, Path("/").stat()):
        # Entering the mount namespace would leave a chroot. In a chroot, hosts have no names.
        os.close(opened.pop("mnt"))
    return Namespace(name, opened)


def _mount_hosts_file(libc: ctypes.CDLL, addresses: Mapping[str, str]) -> None:
    """Mount an /etc/hosts with the names of all hosts, since no name server is reachable; do nothing if not possible.

    Later mounts outside are visible in the namespace; mounts in the namespace are not visible outside.
    """
    lines = ["127.0.0.1 localhost", "::1 localhost", *[f"{address} {name}" for name, address in addresses.items()]]
    with tempfile.NamedTemporaryFile("w", prefix="paceline-") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        if libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None) == 0:
            libc.mount(os.fsencode(file.name), os.fsencode(_HOSTS_FILE), None, _MS_BIND, None)
