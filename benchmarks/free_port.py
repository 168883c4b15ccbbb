"""A free port for the ranks that a benchmark starts on this host."""

from __future__ import annotations

import socket

from paceline.comm.network import LOOPBACK


def free_port(address: str = LOOPBACK) -> int:
    """Return a port that is currently free. Another process may take it; bind port 0 where the API allows it."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])
