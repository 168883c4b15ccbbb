"""Memory that the ranks of one host share, and that has no name: nothing of it can be left behind, whoever crashes.

The first rank of a host makes a `memfd`, a file in memory that no folder holds, for its owner alone (0600) and of a
size that nobody can change any more. The others open it through /proc/PID/fd/N, look whether it is what was meant, and
map it. Once all have, its descriptors are closed: the memory lives as long as a process maps it. It does not count
against /dev/shm, of which a container has 64 MB unless told otherwise.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.comm.group import Comm
from paceline.comm.texts import gather_json
from paceline.errors import LaunchError

NAME = "paceline"
"""What /proc/PID/maps shows; it opens nothing."""
TOKEN_BYTES = 32
_HINT = "shared memory wants Linux 3.17 or later and one user for all ranks of a host; another strategy does without it"


@dataclass(frozen=True)
class Peer:
    """A rank of this host, as a process."""

    rank: int
    process: int
    started: str
    """When it was started, by the kernel's count: a number of a process may be given again, with another start."""

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return started(self.process) == self.started


@dataclass(frozen=True)
class HostMemory:
    """A piece of memory and who maps it; the first `TOKEN_BYTES` of it are taken."""

    memory: mmap.mmap
    peers: tuple[Peer, ...]
    """All ranks of the host, this one too, in their order."""
    place: int
    """Which of them this rank is."""


def share_memory(size: int, comm: Comm) -> HostMemory:
    """Memory of at least so many bytes, all zero, the same for all ranks of this rank's host. Every rank calls it."""
    members = next(host for host in comm.hosts if comm.rank in host)
    file, told, problem = -1, dict[str, Any](), ""
    try:
        if comm.rank == members[0]:
            file = _make(size, token := secrets.token_bytes(TOKEN_BYTES))
            told = {"file": file, "token": token.hex(), "size": size}
    except (OSError, AttributeError) as error:
        problem = _words(error)
    everyone = gather_json({**told, "process": os.getpid(), "started": started(os.getpid()), "problem": problem}, comm)
    try:
        _refuse([rank["problem"] for rank in everyone])
        try:
            memory = _open(everyone[members[0]], file)
        except OSError as error:
            problem = _words(error)
        _refuse([rank["problem"] for rank in gather_json({"problem": problem}, comm)])
    finally:
        if file >= 0:
            os.close(file)  # All have it mapped by now, or nobody will.
    peers = tuple(Peer(rank, everyone[rank]["process"], everyone[rank]["started"]) for rank in members)
    return HostMemory(memory, peers, members.index(comm.rank))


def started(process: int) -> str:
    """When a process was started; empty where there is none, or nothing but its exit code is left of it."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZXx" else fields[19]


def _make(size: int, token: bytes) -> int:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "memory without a name is Linux's")
    file = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(file, 0o600)
        os.ftruncate(file, size)
        os.pwrite(file, token, 0)
        # A peer that made it smaller would end the others by SIGBUS.
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(file)
        raise
    return file


def _open(told: dict[str, Any], own: int) -> mmap.mmap:
    """Maps what the first rank of the host has made, `own` there, after a look at what it is."""
    file = own if own >= 0 else os.open(f"/proc/{told['process']}/fd/{told['file']}", os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if (found.st_size, found.st_uid, stat.S_IMODE(found.st_mode)) != (told["size"], os.geteuid(), 0o600):
            raise OSError(errno.EPERM, "the file found is not the one that was meant")
        memory = mmap.mmap(file, told["size"], mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        if file != own:
            os.close(file)
    if not secrets.compare_digest(memory[:TOKEN_BYTES], bytes.fromhex(told["token"])):
        memory.close()
        raise OSError(errno.EPERM, "the memory found is not the one that was meant")
    return memory


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _refuse(problems: Sequence[str]) -> None:
    """Every rank raises the same where one has a problem: nobody waits for one that is gone."""
    for rank, problem in enumerate(problems):
        if problem:
            raise LaunchError(f"rank {rank} cannot share memory with the ranks of its host: {problem}.", hint=_HINT)
