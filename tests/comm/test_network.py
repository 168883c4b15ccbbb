"""Choice of the interface that peers can reach, and errors if there is none."""

from __future__ import annotations

import socket
from collections import namedtuple

import psutil
import pytest

from paceline.comm.network import (
    LOOPBACK,
    Interface,
    address_of,
    addresses_of_name,
    choose_interface,
    is_loopback,
)
from paceline.errors import LaunchError

Address = namedtuple("Address", "address")


def loopback() -> str:
    return next(
        name for name, entries in psutil.net_if_addrs().items() if any(entry.address == LOOPBACK for entry in entries)
    )


def interfaces(monkeypatch: pytest.MonkeyPatch, **addresses: list[str]) -> None:
    listed = {name: [Address(text) for text in texts] for name, texts in addresses.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: listed)


def test_ranks_of_one_host_use_the_loopback_interface() -> None:
    assert choose_interface("no.such.host.invalid", all_on_this_host=True) == Interface(loopback(), LOOPBACK)


def test_a_master_on_the_loopback_interface_is_reached_through_it() -> None:
    assert choose_interface(LOOPBACK, all_on_this_host=False) == Interface(loopback(), LOOPBACK)


def test_all_of_127_is_the_loopback_interface() -> None:
    assert choose_interface("127.0.1.1", all_on_this_host=False).name == loopback()


def test_debians_address_of_the_host_name_maps_to_lo(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces(monkeypatch, eth0=["10.1.2.3"], lo0=[LOOPBACK])
    monkeypatch.setattr("paceline.comm.network.source_address", lambda _: "127.0.1.1")
    assert choose_interface("myself", all_on_this_host=False) == Interface("lo0", "127.0.1.1")


def test_the_interface_is_the_one_with_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces(monkeypatch, lo=[LOOPBACK], eth1=["10.1.2.30", "fe80::1%eth1"], eth0=["10.1.2.3"])
    monkeypatch.setattr("paceline.comm.network.source_address", lambda master: master)
    assert choose_interface("10.1.2.3", all_on_this_host=False).name == "eth0"
    assert choose_interface("10.1.2.30", all_on_this_host=False).name == "eth1"
    assert choose_interface("fe80::1", all_on_this_host=False).name == "eth1"


def test_an_address_without_an_interface_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces(monkeypatch, lo=[LOOPBACK], eth0=["10.1.2.3"])
    monkeypatch.setattr("paceline.comm.network.source_address", lambda _: "10.9.9.9")
    with pytest.raises(LaunchError, match=r"no network interface has the address 10\.9\.9\.9") as caught:
        choose_interface("master", all_on_this_host=False)
    assert "--iface" in (caught.value.hint or "")


def test_a_host_without_a_loopback_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces(monkeypatch, lo=[], eth0=["10.1.2.3"])
    with pytest.raises(LaunchError, match=r"no network interface has the address 127\.0\.0\.1"):
        choose_interface("master", all_on_this_host=True)


@pytest.mark.parametrize("master", ["no.such.host.invalid", "a..b", "x" * 300])
def test_a_master_that_does_not_resolve_is_an_error(master: str) -> None:
    with pytest.raises(LaunchError, match="no route to the master") as caught:
        choose_interface(master, all_on_this_host=False)
    assert master in caught.value.message
    assert "--master" in (caught.value.hint or "")
    assert "--iface" in (caught.value.hint or "")


def test_the_address_of_an_interface() -> None:
    assert address_of(loopback()) == LOOPBACK
    assert address_of("none0") is None


def test_of_several_addresses_gloos_preferred_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = namedtuple("entry", "family address")
    link, six, four = (socket.AF_PACKET, "00:00"), (socket.AF_INET6, "fe80::1%eth0"), (socket.AF_INET, "10.1.2.3")
    both = {"eth0": [entry(*link), entry(*six), entry(*four)], "eth1": [entry(*link), entry(*six)]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: both)
    assert address_of("eth0") == "10.1.2.3"
    assert address_of("eth1,eth0") == "fe80::1"


def test_addresses_of_a_name() -> None:
    assert LOOPBACK in addresses_of_name("localhost")
    assert addresses_of_name("no.such.host.invalid") == []
    assert addresses_of_name("a..b") == []


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("127.0.1.1", True), ("::1", True), ("10.1.2.3", False), ("fe80::1", False), ("no address", False)],
)
def test_loopback_addresses(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback
