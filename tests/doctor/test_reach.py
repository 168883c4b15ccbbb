"""Tests of reachability: hosts that cannot connect raise an error with the address, instead of hanging."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from paceline.comm.network import LOOPBACK
from paceline.doctor import reach
from paceline.doctor.reach import check_reach
from paceline.errors import LaunchError


def check(networks: list[str], interface: str = "lo") -> list[BaseException | None]:
    """Return every rank's result; ranks are threads here, since only sockets and a store are involved."""
    store = HashStore()

    def one(rank: int) -> None:
        check_reach(store, rank, len(networks), interface, network=networks[rank])

    with ThreadPoolExecutor(len(networks)) as ranks:
        return [future.exception() for future in [ranks.submit(one, rank) for rank in range(len(networks))]]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """Return the addresses that were connected to."""
    found: list[tuple[str, int]] = []
    lock, connect = threading.Lock(), reach.socket.create_connection

    def note(address: tuple[str, int], timeout: float) -> object:
        with lock:
            found.append(address)
        return connect(address, timeout=timeout)

    monkeypatch.setattr(reach.socket, "create_connection", note)
    return found


def test_the_first_ranks_of_hosts_reach_each_other(tried: list[tuple[str, int]]) -> None:
    assert check(["a", "a", "b", "b"]) == [None] * 4
    assert len(tried) == 2
    assert {address for address, _ in tried} == {LOOPBACK}
    assert len({port for _, port in tried}) == 2


def test_ranks_of_one_host_try_nothing(tried: list[tuple[str, int]]) -> None:
    assert check(["a", "a"]) == [None, None]
    assert tried == []


def test_a_port_that_cannot_be_reached_is_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: tuple[str, int], timeout: float) -> object:  # noqa: ARG001
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(reach.socket, "create_connection", refuse)
    errors = check(["a", "b"])
    assert len({str(error) for error in errors}) == 1
    assert all(isinstance(error, LaunchError) for error in errors)
    assert f"at {LOOPBACK}:" in str(errors[0])
    assert "Connection refused" in str(errors[0])
    assert "--iface" in getattr(errors[0], "hint", "")


def test_an_interface_without_an_address_is_an_error() -> None:
    (error,) = check(["a"], interface="none0")
    assert isinstance(error, LaunchError)
    assert "'none0'" in error.message
    assert "lo" in (error.hint or "")
