"""Reads what the kernel counted on this process's own sockets: the payload that `ss -ti` prints. Free of torch.

Neither root nor a tool is needed, and it is the same on the loopback interface, on real hosts and on emulated ones.
Only Linux counts so: elsewhere nothing is found, which is never an error. The layout of the counters is that of the
kernel's `struct tcp_info`, which only ever grows; what an old kernel does not have is not there.
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
"""Of the network that this process is in; /sys/class/net shows those of whoever mounted it."""
_TCP_INFO = getattr(socket, "TCP_INFO", 11)
_LONGEST_INFO = 1024
_ACKED_AND_RECEIVED = 120
"""Where in it are the payload that the peer has confirmed, and the payload that came in. Since Linux 4.1."""
_SENT_AND_RESENT = 200
"""Where are the payload handed to the network, and what of it was handed to it again. Since Linux 4.19."""


@dataclass(frozen=True)
class SocketName:
    """A socket of this process: numbers of descriptors are used again, its inode's not while it is open."""

    descriptor: int
    inode: int


@dataclass(frozen=True)
class Connection:
    """What a TCP connection has carried so far. Payload alone: no headers, nothing twice."""

    local: str
    remote: str
    """Addresses with ports; those of the peer's end are the same the other way round."""
    sent_bytes: int
    received_bytes: int
    retransmitted_bytes: int
    """What had to be sent again, which is not among what was sent."""


@dataclass(frozen=True)
class InterfaceBytes:
    """What a network interface has carried so far, whoever made it do so, headers and all."""

    sent_bytes: int
    received_bytes: int


def open_sockets() -> frozenset[SocketName]:
    """The sockets that this process has open."""
    try:
        descriptors = [int(entry.name) for entry in DESCRIPTORS.iterdir()]
    except OSError:
        return frozenset()
    return frozenset(SocketName(number, inode) for number in descriptors if (inode := _inode(number)) is not None)


def connections(sockets: Iterable[SocketName]) -> list[Connection]:
    """Those of the sockets that are TCP connections, as they stand now; what has been closed is left out."""
    found = (_connection(name.descriptor) for name in sockets if _inode(name.descriptor) == name.inode)
    return [connection for connection in found if connection is not None]


def interface_bytes(interface: str) -> InterfaceBytes | None:
    """The counters of an interface, or of the first of several named with commas; None where there are none."""
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
    except OSError:  # It listens, or is no longer connected.
        return None
    finally:
        handle.detach()  # It is somebody else's to close.
    return None if counters is None else Connection(local, remote, *counters)


def _counters(info: bytes) -> tuple[int, int, int] | None:
    """Bytes sent once, received, and sent again, from a `struct tcp_info`; None where it is too old to have them."""
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
