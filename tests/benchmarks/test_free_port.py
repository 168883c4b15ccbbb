"""Tests of benchmarks/free_port.py."""

from __future__ import annotations

import runpy
import socket

from benchmarks import FOLDER
from paceline.comm.network import LOOPBACK


def test_a_free_port_can_be_bound() -> None:
    port = runpy.run_path(str(FOLDER / "free_port.py"))["free_port"]()
    with socket.create_server((LOOPBACK, port)) as server:
        assert server.getsockname()[1] == port > 0
