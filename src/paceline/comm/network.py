"""Choose the network interface that peers can reach. Imports no torch, so that the launcher can use it.

Gloo binds the address that the host's own name resolves to. On many machines that is 127.0.1.1 (pytorch#15592), and
peers on other hosts then connect to themselves. Peers can reach the interface on the route to the master.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from paceline.errors import LaunchError

LOOPBACK = "127.0.0.1"
_FAMILIES = {socket.AF_INET: 0, socket.AF_INET6: 1}
"""Address families that Gloo supports, in its order of preference."""
_REMOTE_ADDRESS = "192.0.2.1"  # Reserved for documentation (RFC 5737), so it is behind the default route.
_ANY_PORT = 9  # Connecting a datagram socket sends nothing; the kernel only looks up the route.


@dataclass(frozen=True)
class Interface:
    """A network interface and this host's address on it."""

    name: str
    address: str


def choose_interface(master: str, *, all_on_this_host: bool) -> Interface:
    """Return the interface on the route to the master; the loopback interface if all ranks are on this host."""
    address = LOOPBACK if all_on_this_host else source_address(master)
    return Interface(name=_interface_with(address), address=address)


def address_of(interface: str) -> str | None:
    """Return this host's address on an interface (the first of a comma-separated list); None if it has none."""
    import psutil

    addresses = psutil.net_if_addrs().get(interface.partition(",")[0], [])
    usable = sorted((entry for entry in addresses if entry.family in _FAMILIES), key=lambda e: _FAMILIES[e.family])
    return usable[0].address.partition("%")[0] if usable else None


def addresses_of_name(name: str) -> list[str]:
    """Return the addresses that a host name resolves to; empty if it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def reachable_addresses() -> list[str]:
    """Return this host's address on the default route; without a route, all but its loopback addresses."""
    import psutil

    try:
        return [source_address(_REMOTE_ADDRESS)]
    except LaunchError:
        entries = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
        return [e.address for e in entries if e.family is socket.AF_INET and not is_loopback(e.address)]


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of an address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def source_address(master: str) -> str:
    """Return this host's address on the route to another host, usually the master."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(master, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name, such as "a..b".
        raise LaunchError(
            f"no route to the master {master!r}: {error}.",
            hint="check the address in --master, or name the interface with --iface",
        ) from None


def _interface_with(address: str) -> str:
    """Return the name of the interface that has an address."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    if address.startswith("127.") and address != LOOPBACK:  # All of 127.0.0.0/8 belongs to the loopback interface.
        return _interface_with(LOOPBACK)
    raise LaunchError(f"no network interface has the address {address}.", hint="name the interface to use with --iface")
