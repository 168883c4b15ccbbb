"""Socket counters equal those that `ss` prints, for this process's connections only."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.measure import sockets
from paceline.measure.sockets import InterfaceBytes, connections, interface_bytes, open_sockets

SENT = 1_234_567
BACK = 89


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return the two ends of a connection that has carried data in both directions."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            one.setblocking(False)
            sent = received = 0
            while received < SENT:
                if sent < SENT:
                    with contextlib.suppress(BlockingIOError):
                        sent += one.send(bytes(SENT - sent))
                received += len(other.recv(1 << 20))
            other.sendall(bytes(BACK))
            yield one, other


def wait_for_reply(one: socket.socket) -> None:
    """Wait until the reply has arrived."""
    deadline_s = time.monotonic() + 5
    while not one.recv(BACK, socket.MSG_PEEK) and time.monotonic() < deadline_s:
        time.sleep(0.001)


def test_both_ends_have_counted_the_payload(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    one.setblocking(True)
    wait_for_reply(one)
    found = {connection.local: connection for connection in connections(open_sockets())}
    ends = ["{}:{}".format(*end.getsockname()) for end in (one, other)]
    first, second = (found[end] for end in ends)
    assert (first.local, first.remote) == (second.remote, second.local) == tuple(ends)
    assert (first.sent_bytes, first.received_bytes) == (SENT, BACK)
    assert (second.sent_bytes, second.received_bytes) == (BACK, SENT)


@pytest.mark.skipif(shutil.which("ss") is None, reason="needs iproute2")
def test_counters_are_those_that_ss_prints(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    one.setblocking(True)
    wait_for_reply(one)
    time.sleep(0.1)  # The last acknowledgement may still be in transit.
    own = {connection.local: connection for connection in connections(open_sockets())}
    for end in (one, other):
        local = "{}:{}".format(*end.getsockname())
        printed = subprocess.run(
            ["ss", "-tinH", "src", local, "dst", own[local].remote], capture_output=True, text=True, check=True
        ).stdout
        counted = {name: int(value) for name, value in re.findall(r"(bytes_\w+):(\d+)", printed)}
        assert own[local].sent_bytes == counted["bytes_sent"] - counted.get("bytes_retrans", 0)
        assert counted["bytes_acked"] - own[local].sent_bytes in (0, 1), (
            "the connecting end also counts the SYN as acknowledged"
        )
        assert own[local].received_bytes == counted["bytes_received"]
        assert own[local].retransmitted_bytes == counted.get("bytes_retrans", 0)


def test_only_connections_are_returned(tmp_path: Path) -> None:
    before = open_sockets()
    with (
        socket.create_server(("127.0.0.1", 0)),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        socket.socket(socket.AF_UNIX),
        (tmp_path / "file").open("w"),
    ):
        opened = open_sockets() - before
        assert len(opened) == 3, "a file is not a socket"
        assert connections(opened) == []


def test_a_closed_socket_is_left_out_if_its_descriptor_is_reused(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    before = open_sockets()
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        names = {name for name in open_sockets() - before if name.descriptor == first.fileno()}
        assert len(connections(names)) == 1
        number = first.fileno()
        first.close()
        os.dup2(pair[0].fileno(), number)
        try:
            assert connections(names) == []
        finally:
            os.close(number)


def test_reading_does_not_change_sockets(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    before = open_sockets()
    connections(before)
    assert open_sockets() == before
    assert one.getblocking() is False
    one.setblocking(True)
    other.sendall(b"still open")
    assert one.recv(BACK + 10, socket.MSG_WAITALL)[-10:] == b"still open"


def test_an_old_kernel_has_fewer_counters() -> None:
    info = bytearray(280)
    struct.pack_into("=QQ", info, 120, 700, 900)  # Acknowledged, received.
    struct.pack_into("=QQ", info, 200, 1000, 250)  # Sent, of which retransmitted.
    assert sockets._counters(bytes(info)) == (750, 900, 250)
    assert sockets._counters(bytes(info[:192])) == (700, 900, 0)
    assert sockets._counters(bytes(info[:104])) is None


def test_without_proc_nothing_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sockets, "DESCRIPTORS", tmp_path / "none")
    monkeypatch.setattr(sockets, "INTERFACES", tmp_path / "none")
    assert open_sockets() == frozenset()
    assert interface_bytes("lo") is None


def test_addresses_of_both_families() -> None:
    assert sockets._address(("10.0.0.1", 80)) == "10.0.0.1:80"
    assert sockets._address(("::ffff:10.0.0.1", 80, 0, 0)) == "10.0.0.1:80"
    assert sockets._address(("fe80::1%eth0", 80, 0, 2)) == "[fe80::1]:80"


def test_the_counters_of_an_interface(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = tmp_path / "dev"
    table.write_text(
        "Inter-|   Receive                                                |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls\n"
        "    lo:     100       1    0    0    0     0          0         0      200       1    0    0    0     0\n"
        "veth10:    7000       5    0    0    0     0          0         0     9000       6    0    0    0     0\n"
    )
    monkeypatch.setattr(sockets, "INTERFACES", table)
    assert interface_bytes("veth10") == interface_bytes("veth10,lo") == InterfaceBytes(9000, 7000)
    assert interface_bytes("veth1") is None


def test_the_loopback_interface_counts() -> None:
    before = interface_bytes("lo")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        one.sendall(bytes(1000))
    after = interface_bytes("lo")
    assert before is not None
    assert after is not None
    assert after.sent_bytes - before.sent_bytes > 1000
