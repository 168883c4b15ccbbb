"""Chooses the network interface that peers can reach. Free of torch, so that the launcher can announce it.

Gloo binds whatever the host's own name resolves to, which on many machines is 127.0.1.1 (pytorch#15592): peers on other
hosts then connect to themselves. The interface that routes to the master is the one they can reach.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from paceline.errors import LaunchError

LOOPBACK = "127.0.0.1"
_FAMILIES = {socket.AF_INET: 0, socket.AF_INET6: 1}
"""Those that Gloo speaks, in the order of its choice."""
_FAR_AWAY = "192.0.2.1"  # Of a range that documentation may use: it is behind the default route.
_ANY_PORT = 9  # Connecting a datagram socket sends nothing; it only asks the kernel for a route.


@dataclass(frozen=True)
class Interface:
    """A network interface and this host's address on it."""

    name: str
    address: str


def choose_interface(master: str, *, all_on_this_host: bool) -> Interface:
    """The interface that routes to the master; the loopback one when no rank is elsewhere."""
    address = LOOPBACK if all_on_this_host else source_address(master)
    return Interface(name=_interface_with(address), address=address)


def free_port(address: str = LOOPBACK) -> int:
    """A port that was free a moment ago; prefer binding port 0 where the API lets you."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


def address_of(interface: str) -> str | None:
    """This host's address on an interface, or on the first of several that are named with commas; None without one."""
    import psutil

    addresses = psutil.net_if_addrs().get(interface.partition(",")[0], [])
    usable = sorted((entry for entry in addresses if entry.family in _FAMILIES), key=lambda e: _FAMILIES[e.family])
    return usable[0].address.partition("%")[0] if usable else None


def addresses_of_name(name: str) -> list[str]:
    """What a host name resolves to; nothing where it does not."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_loopback(address: str) -> bool:
    """Whether only this host itself is reached by it."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def reachable_addresses() -> list[str]:
    """This host's addresses that others may reach: that on the default route, else all but the loopback ones."""
    import psutil

    try:
        return [source_address(_FAR_AWAY)]
    except LaunchError:
        entries = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
        return [e.address for e in entries if e.family is socket.AF_INET and not is_loopback(e.address)]


def listen(address: str) -> socket.socket:
    """A socket that listens on a free port of an address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def source_address(master: str) -> str:
    """This host's address on the route to another, the master as a rule."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(master, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be one, as "a..b".
        raise LaunchError(
            f"no route to the master {master!r}: {error}.",
            hint="check the address in --master, or name the interface with --iface",
        ) from None


def _interface_with(address: str) -> str:
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    if address.startswith("127.") and address != LOOPBACK:  # All of 127.0.0.0/8 is its interface's, listed or not.
        return _interface_with(LOOPBACK)
    raise LaunchError(f"no network interface has the address {address}.", hint="name one with --iface")
