"""Count, at the sockets of a run's own groups, the bytes that each rank sends to each other rank in windows of steps.

The kernel counts the bytes. A window's bytes are the difference between two readings of its counters, both taken while
nothing is in transit: all ranks finish a window before any rank reads, and no rank continues before all have read. Both
ends of a connection then have the same count, including Gloo's control messages, without waiting for acknowledgements.

Servers do not wait for the readings: a server may announce at any time that it can receive the next request. So a count
of what servers send may be off by one such announcement, 48 bytes per connection and window.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from paceline.comm.group import Comm
from paceline.comm.messages.json_messages import gather_typed
from paceline.measure.host import network_id
from paceline.measure.sockets import InterfaceBytes, connections, interface_bytes
from paceline.records.summary import InterfaceTraffic, SocketLink, SocketTraffic

ConnectionEnds = tuple[str, str]
"""Local and remote address of a connection."""
CountedConnection = tuple[str, str, int, int, int]
"""Local and remote address of a connection, bytes sent, received and retransmitted."""


@dataclass(frozen=True)
class SocketReading:
    """Counters of one rank at one time."""

    sent: Mapping[ConnectionEnds, int]
    received: Mapping[ConnectionEnds, int]
    resent: Mapping[ConnectionEnds, int]
    interface: InterfaceBytes | None


class PayloadOnRank(msgspec.Struct, frozen=True, kw_only=True):
    """Byte counts of one rank, over all counted windows."""

    network: str
    """Identifier of its host's network."""
    interface: str
    connections: list[CountedConnection]
    on_interface: InterfaceBytes | None
    """Bytes on the interface; None if they cannot be read."""


class PayloadCount:
    """Payload of a run, summed over its counted windows. All ranks must make the same calls at the same steps."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        self._steps = 0
        self._sent = Counter[ConnectionEnds]()
        self._received = Counter[ConnectionEnds]()
        self._resent = Counter[ConnectionEnds]()
        self._on_interface = Counter[str]()
        self._last: SocketReading | None = None
        self._is_discarded = False

    def discard_window(self) -> None:
        """Leave the current window out of the count, because traffic other than that of steps uses the groups."""
        self._is_discarded = True

    def close_window(self, steps: int, *, counts: bool) -> None:
        """End a window of `steps` steps. Ranks must have synchronised over the control group just before."""
        reading = self._read()
        discarded = self._comm.control.largest(float(self._is_discarded)) > 0  # No rank continues before all have read.
        if counts and not discarded and self._last is not None:
            self._steps += steps
            self._add(self._last, reading)
        self._last, self._is_discarded = reading, False

    def result(self) -> SocketTraffic | None:
        """Return the entry for the run's record, on every rank; None if a rank could not count. All ranks call this."""
        ends = sorted(self._received)
        own = PayloadOnRank(
            network=network_id(),
            interface=self._interface,
            connections=[(*end, self._sent[end], self._received[end], self._resent[end]) for end in ends],
            on_interface=InterfaceBytes(**self._on_interface) if self._on_interface else None,
        )
        ranks = gather_typed(own, PayloadOnRank, self._comm.control)
        links = match_connections([rank.connections for rank in ranks], self._comm.owned.server_connections)
        all_pairs = self._comm.world_size * (self._comm.world_size - 1)
        if not self._steps or len(links) < all_pairs:
            return None
        # 100 ranks have 9,900 pairs, and few of them carry traffic.
        used = [link for link in links if link.sent_bytes or link.received_bytes]
        return SocketTraffic(steps=self._steps, links=used, interfaces=_interfaces(ranks))

    def _read(self) -> SocketReading:
        found = connections(self._comm.owned.sockets)
        return SocketReading(
            sent={(one.local, one.remote): one.sent_bytes for one in found},
            received={(one.local, one.remote): one.received_bytes for one in found},
            resent={(one.local, one.remote): one.retransmitted_bytes for one in found},
            interface=interface_bytes(self._interface),
        )

    def _add(self, before: SocketReading, after: SocketReading) -> None:
        for total, first, last in (
            (self._sent, before.sent, after.sent),
            (self._received, before.received, after.received),
            (self._resent, before.resent, after.resent),
        ):
            for ends, size in last.items():
                total[ends] += size - first.get(ends, 0)
        if before.interface is not None and after.interface is not None:
            self._on_interface["sent_bytes"] += after.interface.sent_bytes - before.interface.sent_bytes
            self._on_interface["received_bytes"] += after.interface.received_bytes - before.interface.received_bytes


def match_connections(
    ranks: Sequence[Sequence[CountedConnection]], uncounted: Mapping[ConnectionEnds, int] | None = None
) -> list[SocketLink]:
    """Return the bytes between each pair of ranks.

    `ranks` holds each rank's connections. `uncounted` maps the connections of ranks that do not count to these ranks:
    their bytes are taken from the peer's counters.

    A connection whose other end belongs to no rank is ignored: another program opened it, or addresses are translated
    on the way.
    """
    uncounted = uncounted or {}
    owners = {(local, remote): rank for rank, own in enumerate(ranks) for local, remote, *_ in own} | {**uncounted}
    links: dict[tuple[int, int], Counter[str]] = {}
    for rank, own in enumerate(ranks):
        for local, remote, sent, received, resent in own:
            peer = owners.get((remote, local))
            if peer is None or peer == rank:
                continue
            links.setdefault((rank, peer), Counter()).update(sent_bytes=sent, retransmitted_bytes=resent)
            links.setdefault((peer, rank), Counter()).update(received_bytes=received)
            if (remote, local) in uncounted:
                links[rank, peer].update(received_bytes=sent)
                links[peer, rank].update(sent_bytes=received, retransmitted_bytes=0)
    return [SocketLink(source=source, target=target, **counts) for (source, target), counts in sorted(links.items())]


def _interfaces(ranks: Sequence[PayloadOnRank]) -> list[InterfaceTraffic]:
    """Return the byte counts of each host's interface, as read by its first rank."""
    hosts: dict[tuple[str, str], list[int]] = {}
    counts: dict[tuple[str, str], InterfaceBytes] = {}
    for number, rank in enumerate(ranks):
        if rank.on_interface is not None:
            hosts.setdefault((rank.network, rank.interface), []).append(number)
            counts.setdefault((rank.network, rank.interface), rank.on_interface)
    return [
        InterfaceTraffic(
            name=host[1],
            ranks=members,
            sent_bytes=counts[host].sent_bytes,
            received_bytes=counts[host].received_bytes,
        )
        for host, members in hosts.items()
    ]
