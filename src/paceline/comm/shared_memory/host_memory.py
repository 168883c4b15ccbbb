"""Anonymous memory that the ranks of one host share. No file system holds it, so a crash leaves nothing behind.

The first rank of a host creates a `memfd`: a file in memory that is in no folder, belongs to its owner alone (0600) and
has a sealed size. The other ranks open it through /proc/PID/fd/N, verify it, and map it. Once all ranks have mapped it,
its descriptors are closed; the kernel frees the memory when no process maps it any more. It does not count against
/dev/shm, which has 64 MB in a container by default.
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

import msgspec

from paceline.comm.group import Comm
from paceline.comm.messages.json_messages import gather_typed
from paceline.errors import LaunchError

MEMFD_NAME = "paceline"
"""Name of the memory in /proc/PID/maps; it cannot be opened by this name."""
TOKEN_BYTES = 32
_HINT = (
    "shared memory needs Linux 3.17 or later, and all ranks of a host must run as the same user; "
    "if that is not possible, use another strategy"
)


@dataclass(frozen=True)
class Peer:
    """The process of a rank on this host."""

    rank: int
    pid: int
    start_ticks: str
    """Start time of the process in the kernel's clock ticks. It identifies the process, since pids are reused."""

    @property
    def is_alive(self) -> bool:
        """Whether the process is still running."""
        return start_ticks_of(self.pid) == self.start_ticks


@dataclass(frozen=True)
class HostMemory:
    """A piece of memory and the ranks that map it. Its first `TOKEN_BYTES` are reserved."""

    memory: mmap.mmap
    peers: tuple[Peer, ...]
    """All ranks of the host, including this one, in order."""
    position: int
    """Index of this rank in `peers`."""


class SharingProcess(msgspec.Struct, frozen=True, kw_only=True):
    """The process of a rank, and the memory that it offers if it is the first rank of its host."""

    pid: int
    start_ticks: str
    file: int
    """Descriptor of the memory; -1 if the rank has created none."""
    token: str
    """Content of the first bytes of the memory, as hexadecimal digits."""
    size: int
    """Bytes of the memory."""
    problem: str
    """Why the rank could not create the memory; empty otherwise."""


def share_memory(size: int, comm: Comm) -> HostMemory:
    """Return zeroed memory of `size` bytes, shared by all ranks of this rank's host. Every rank calls this.

    Raise a `LaunchError` on every rank if it fails on one of them.
    """
    members = next(host for host in comm.hosts if comm.rank in host)
    file, token, problem = -1, secrets.token_bytes(TOKEN_BYTES), ""
    try:
        if comm.rank == members[0]:
            file = _create(size, token)
    except (OSError, AttributeError) as error:
        problem = _reason(error)
    pid = os.getpid()
    own = SharingProcess(
        pid=pid, start_ticks=start_ticks_of(pid), file=file, token=token.hex(), size=size, problem=problem
    )
    ranks = gather_typed(own, SharingProcess, comm.control)
    try:
        _raise_first([rank.problem for rank in ranks])
        try:
            memory = _map(ranks[members[0]], file)
        except OSError as error:
            problem = _reason(error)
        _raise_first(gather_typed(problem, str, comm.control))
    finally:
        if file >= 0:
            os.close(file)  # All ranks have mapped it by now, or none will.
    peers = tuple(Peer(rank, ranks[rank].pid, ranks[rank].start_ticks) for rank in members)
    return HostMemory(memory, peers, members.index(comm.rank))


def start_ticks_of(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot; empty if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZXx" else fields[19]


def _create(size: int, token: bytes) -> int:
    """Create the memory, write the token that identifies it, and return its file descriptor."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "anonymous shared files are only available on Linux")
    file = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(file, 0o600)
        os.ftruncate(file, size)
        os.pwrite(file, token, 0)
        # If a peer could shrink the file, the other ranks would be killed by SIGBUS.
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(file)
        raise
    return file


def _map(created: SharingProcess, own: int) -> mmap.mmap:
    """Verify and map the memory that the first rank of the host created; `own` is its descriptor there, else -1."""
    file = own if own >= 0 else os.open(f"/proc/{created.pid}/fd/{created.file}", os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if (found.st_size, found.st_uid, stat.S_IMODE(found.st_mode)) != (created.size, os.geteuid(), 0o600):
            raise OSError(errno.EPERM, "the file opened has the wrong size, owner or permissions")
        memory = mmap.mmap(file, created.size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        if file != own:
            os.close(file)
    if not secrets.compare_digest(memory[:TOKEN_BYTES], bytes.fromhex(created.token)):
        memory.close()
        raise OSError(errno.EPERM, "the memory opened does not contain the expected token")
    return memory


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _raise_first(problems: Sequence[str]) -> None:
    """Raise the first rank's problem on every rank, so that no rank waits for one that has failed."""
    for rank, problem in enumerate(problems):
        if problem:
            raise LaunchError(f"rank {rank} cannot share memory with the ranks of its host: {problem}.", hint=_HINT)
