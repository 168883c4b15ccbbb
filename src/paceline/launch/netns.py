"""Network namespaces without names: they live as long as someone has them open, so none can be left behind."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError

_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000
_ENTER = Path(__file__).with_name("enter.py")
_NO_IPV6 = Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")


@dataclass(frozen=True)
class Namespace:
    """A network of its own and a host name of its own, held open by two descriptors of this process.

    When this process ends, however it ends, and all that it started in here with it, the kernel takes the network away.
    """

    name: str
    net: int
    uts: int

    def popen(self, *command: str, pass_fds: Sequence[int] = (), **options: Any) -> subprocess.Popen[Any]:
        """Starts a program in here, which ends with this process (to be exact, with the thread that calls this)."""
        enter = [sys.executable, "-I", "-S", str(_ENTER), str(os.getpid()), f"{self.net},{self.uts}", "--"]
        return subprocess.Popen([*enter, *command], pass_fds=(self.net, self.uts, *pass_fds), **options)

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
        os.close(self.net)
        os.close(self.uts)


def new_namespace(name: str) -> Namespace:
    """Makes a network namespace whose host is called `name`.

    Namespaces belong to threads: one that ends at once makes it, and nothing changes for the rest of this process.
    """
    made: list[Namespace | OSError] = []

    def make() -> None:
        try:
            made.append(_make(name))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    (result,) = made
    if isinstance(result, Namespace):
        return result
    if result.errno in (errno.EPERM, errno.EACCES):
        raise LaunchError(
            "emulated hosts have networks of their own, which only root may make.",
            hint="run it with sudo, or in a container with --cap-add NET_ADMIN --cap-add SYS_ADMIN",
        )
    raise LaunchError(f"the kernel cannot make a network for an emulated host: {result.strerror}.")


def _make(name: str) -> Namespace:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET | _CLONE_NEWUTS) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    socket.sethostname(name)
    with suppress(OSError):  # Where the kernel has no IPv6. Its chatter would count as traffic.
        _NO_IPV6.write_text("1")
    net = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    return Namespace(name, net, os.open("/proc/thread-self/ns/uts", os.O_RDONLY | os.O_CLOEXEC))
