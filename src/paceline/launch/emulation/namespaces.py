"""Namespaces without a name that could be left behind: they last as long as the process that made them."""

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
_HOST_NAMES = Path("/etc/hosts")
_NO_IPV6 = Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")


@dataclass(frozen=True)
class Namespace:
    """A network, a host name, and a view of the file system in which hosts are known by name.

    Descriptors of this process hold them. When it ends, however it ends, and all that it started in here with it, the
    kernel takes the network away.
    """

    name: str
    descriptors: Mapping[str, int]
    """By the kind of namespace, as /proc names it."""

    @property
    def net(self) -> int:
        """The descriptor of the network."""
        return self.descriptors["net"]

    def popen(self, *command: str, pass_fds: Sequence[int] = (), **options: Any) -> subprocess.Popen[Any]:
        """Starts a program in here, which ends with this process (to be exact, with the thread that calls this)."""
        held = list(self.descriptors.values())
        enter = [sys.executable, "-I", "-S", str(_ENTER), str(os.getpid()), ",".join(map(str, held)), "--"]
        return subprocess.Popen([*enter, *command], pass_fds=(*held, *pass_fds), **options)

    def run(self, *command: str, input: str | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a program in here to its end, and returns what it printed."""
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
        """Lets go of it."""
        for descriptor in self.descriptors.values():
            os.close(descriptor)


def new_namespace(name: str, addresses: Mapping[str, str]) -> Namespace:
    """Makes the namespaces of a host called `name`, which knows the addresses of others by their names.

    Namespaces belong to threads: one that ends at once makes it, and nothing changes for the rest of this process.
    """
    made: list[Namespace | OSError] = []

    def make() -> None:
        try:
            made.append(_make(name, addresses))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    (result,) = made
    if isinstance(result, Namespace):
        return result
    if result.errno in (errno.EPERM, errno.EACCES):
        raise not_allowed()
    raise LaunchError(f"the kernel cannot make a network for an emulated host: {result.strerror}.")


def not_allowed() -> LaunchError:
    """The error for who may not make networks."""
    return LaunchError(
        "emulated hosts have networks of their own, which only root may make.",
        hint="run it with sudo, or as `unshare --map-root-user paceline …` where users may do that; a container needs "
        "--cap-add NET_ADMIN --cap-add SYS_ADMIN",
    )


def _make(name: str, addresses: Mapping[str, str]) -> Namespace:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET | _CLONE_NEWUTS | _CLONE_NEWNS) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    socket.sethostname(name)
    with suppress(OSError):  # Where the kernel has no IPv6. Its chatter would count as traffic.
        _NO_IPV6.write_text("1")
    _know(libc, addresses)
    opened = {
        kind: os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("net", "uts", "mnt")
    }
    before = Path("/").stat()
    if libc.setns(opened["mnt"], 0) != 0 or not os.path.samestat(before, Path("/").stat()):
        # Who enters a view of the file system leaves his chroot. In one, hosts do without names.
        os.close(opened.pop("mnt"))
    return Namespace(name, opened)


def _know(libc: ctypes.CDLL, addresses: Mapping[str, str]) -> None:
    """Has names of hosts found without asking the outside, which is out of reach; where it cannot be, they are not.

    What others mount later is seen in here too, and what is mounted in here is not seen outside.
    """
    lines = ["127.0.0.1 localhost", "::1 localhost", *[f"{address} {name}" for name, address in addresses.items()]]
    with tempfile.NamedTemporaryFile("w", prefix="paceline-") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        if libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None) == 0:
            libc.mount(os.fsencode(file.name), os.fsencode(_HOST_NAMES), None, _MS_BIND, None)
