"""Read the kernel's byte counters of this process's sockets, as printed by `ss -ti`. Imports no torch.

This needs neither root nor tools, and works the same on the loopback interface, on real and on emulated hosts. Only
Linux has these counters; elsewhere the functions return nothing, and raise no error. The layout is that of the kernel's
`struct tcp_info`, which only grows: old kernels return a shorter one without the newer counters.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

DESCRIPTORS = Path("/proc/self/fd")
INTERFACES = Path("/proc/self/net/dev")
"""Interfaces of this process's network namespace; /sys/class/net shows those of the namespace that mounted it."""
_TCP_INFO = getattr(socket, "TCP_INFO", 11)
_LONGEST_INFO = 1024
_ACKED_AND_RECEIVED = 120
"""Offset of the bytes acknowledged by the peer and the bytes received (payload), since Linux 4.1."""
_SENT_AND_RESENT = 200
"""Offset of the bytes sent and the bytes retransmitted (payload), since Linux 4.19."""


@dataclass(frozen=True)
class SocketName:
    """Identity of a socket of this process. Descriptors are reused; an inode is not while its socket is open."""

    descriptor: int
    inode: int


@dataclass(frozen=True)
class Connection:
    """Payload of a TCP connection so far, without headers and retransmissions."""

    local: str
    remote: str
    """Addresses with ports; the peer has the same two, swapped."""
    sent_bytes: int
    received_bytes: int
    retransmitted_bytes: int
    """Bytes retransmitted; not included in `sent_bytes`."""


@dataclass(frozen=True)
class InterfaceBytes:
    """Bytes of a network interface so far, of all processes and including headers."""

    sent_bytes: int
    received_bytes: int


def open_sockets() -> frozenset[SocketName]:
    """Return the open sockets of this process."""
    try:
        descriptors = [int(entry.name) for entry in DESCRIPTORS.iterdir()]
    except OSError:
        return frozenset()
    return frozenset(SocketName(number, inode) for number in descriptors if (inode := _inode(number)) is not None)


def connections(sockets: Iterable[SocketName]) -> list[Connection]:
    """Return the current counters of those sockets that are open TCP connections."""
    found = (_connection(name.descriptor) for name in sockets if _inode(name.descriptor) == name.inode)
    return [connection for connection in found if connection is not None]


def interface_bytes(interface: str) -> InterfaceBytes | None:
    """Return the counters of an interface (the first of a comma-separated list); None if it is not found."""
    try:
        lines = INTERFACES.read_text().splitlines()
    except OSError:
        return None
    wanted = interface.partition(",")[0]
    for name, _, counters in (line.partition(":") for line in lines):
        if name.strip() == wanted:
            received, sent = counters.split()[0], counters.split()[8]
            return InterfaceBytes(int(sent), int(received))
    return None


def _inode(descriptor: int) -> int | None:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else None


def _connection(descriptor: int) -> Connection | None:
    try:
        handle = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        if handle.type != socket.SOCK_STREAM or handle.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        counters = _counters(handle.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _LONGEST_INFO))
        local, remote = _address(handle.getsockname()), _address(handle.getpeername())
    except OSError:  # The socket listens, or is no longer connected.
        return None
    finally:
        handle.detach()  # Its owner closes it.
    return None if counters is None else Connection(local, remote, *counters)


def _counters(info: bytes) -> tuple[int, int, int] | None:
    """Return bytes sent, received and retransmitted from a `struct tcp_info`; None if it lacks these counters."""
    if len(info) < _ACKED_AND_RECEIVED + 16:
        return None
    acked, received = struct.unpack_from("=QQ", info, _ACKED_AND_RECEIVED)
    if len(info) < _SENT_AND_RESENT + 16:
        return acked, received, 0
    sent, resent = struct.unpack_from("=QQ", info, _SENT_AND_RESENT)
    return sent - resent, received, resent


def _address(name: tuple[str, int, *tuple[int, ...]]) -> str:
    host = name[0].partition("%")[0].removeprefix("::ffff:")
    return f"[{host}]:{name[1]}" if ":" in host else f"{host}:{name[1]}"
