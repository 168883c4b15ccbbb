"""Check that hosts reach each other's ports before ranks connect; otherwise ranks would hang until a time-out."""

from __future__ import annotations

import itertools
import platform
import socket

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.comm.messages.json_messages import SentT
from paceline.comm.network import address_of, is_loopback, listen
from paceline.errors import LaunchError
from paceline.measure.host import network_id
from paceline.records.failure import ErrorInfo
from paceline.records.writer import encode

CONNECT_S = 5.0


class ListeningRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank, and the port on which it listens for the others."""

    name: str
    """Name of the rank and its host in messages."""
    network: str
    """Identifier of its host's network."""
    address: str
    port: int


def check_reach(store: Store, rank: int, size: int, interface: str, *, network: str | None = None) -> None:
    """Connect the first rank of every host to the first ranks of the other hosts; raise on all ranks if one fails.

    Ranks with the same `network` are on one host and are not tested against each other.
    """
    address = address_of(interface)
    if address is None:
        import psutil

        known = ", ".join(sorted(psutil.net_if_addrs()))
        raise LaunchError(
            f"rank {rank}: the network interface {interface!r} of {platform.node()} has no address.",
            hint=f"choose another interface with --iface: {known}",
        )
    with listen(address) as listener:
        own = ListeningRank(
            name=f"rank {rank} ({platform.node()})",
            network=network or network_id(),
            address=address,
            port=listener.getsockname()[1],
        )
        endpoints = _exchange(store, "endpoint", rank, size, own, ListeningRank)
        first_ranks: dict[str, int] = {}
        for other, endpoint in enumerate(endpoints):
            first_ranks.setdefault(endpoint.network, other)
        peers = [peer for peer in first_ranks.values() if peer != rank] if rank in first_ranks.values() else []
        failures = [failure for peer in peers if (failure := _connection_error(endpoints[rank], endpoints[peer]))]
        # A barrier too: no rank closes its socket before all have tried, and all raise the same error.
        found = list(itertools.chain(*_exchange(store, "found", rank, size, failures, list[ErrorInfo])))
    if found:
        raise LaunchError(found[0].message, hint=found[0].hint)


def _exchange(store: Store, key: str, rank: int, size: int, value: SentT, kind: type[SentT]) -> list[SentT]:
    """Return the value of every rank, exchanged through the store."""
    store.set(f"{key}-{rank}", encode(value).decode())
    return [msgspec.json.decode(store.get(f"{key}-{other}"), type=kind) for other in range(size)]


def _connection_error(own: ListeningRank, peer: ListeningRank) -> ErrorInfo | None:
    """Try to connect to a peer; return the error, None if it succeeds."""
    address, port = peer.address, peer.port
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S):
            return None
    except OSError as error:
        message = f"{own.name} cannot reach {peer.name} at {address}:{port}: {error.strerror or error}."
        if is_loopback(address):
            hint = f"{address} reaches only its own host: name the interface of {peer.name} with --iface"
        else:
            hint = "open the ports between the hosts in their firewalls, or choose another interface with --iface"
        return ErrorInfo(kind=LaunchError.__name__, message=message, hint=hint)
