"""Counts, at the sockets of a run's own groups, how much each rank sends to each other in whole windows of steps.

The kernel counts. A window's bytes are what its counters moved between two moments at which nothing was under way:
every rank has done its share of a window before any of them reads, and none goes on before all have read. Then both
ends of a connection have the same figure, the notices of Gloo included, and nobody has to wait for acknowledgements.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.comm.group import Comm
from paceline.comm.texts import gather_json
from paceline.measure.host import network_id
from paceline.measure.sockets import InterfaceBytes, connections, interface_bytes

Ends = tuple[str, str]
"""The local and the remote address of a connection."""


@dataclass(frozen=True)
class SocketReading:
    """Counters of one rank at one moment."""

    sent: Mapping[Ends, int]
    received: Mapping[Ends, int]
    resent: Mapping[Ends, int]
    interface: InterfaceBytes | None


class PayloadCount:
    """The payload of one run, over those of its windows that count. Every rank calls the same at the same steps."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        self._steps = 0
        self._sent, self._received, self._resent = Counter[Ends](), Counter[Ends](), Counter[Ends]()
        self._on_interface = Counter[str]()
        self._last: SocketReading | None = None
        self._disturbed = False

    def disturb(self) -> None:
        """Says that something else than steps uses the groups now: the window that is open does not count."""
        self._disturbed = True

    def close_window(self, steps: int, *, counts: bool) -> None:
        """A window of so many steps ends; ranks have agreed on it over the control group just before."""
        reading = self._read()
        disturbed = self._comm.largest(float(self._disturbed)) > 0  # Nobody goes on before all have read.
        if counts and not disturbed and self._last is not None:
            self._steps += steps
            self._add(self._last, reading)
        self._last, self._disturbed = reading, False

    def result(self) -> dict[str, Any] | None:
        """What the run's record keeps, on every rank; None where not every rank could count. Every rank calls it."""
        ends = sorted(self._received)
        own = {
            "network": network_id(),
            "interface": self._interface,
            "connections": [[*end, self._sent[end], self._received[end], self._resent[end]] for end in ends],
            "on_interface": dict(self._on_interface) or None,
        }
        ranks = gather_json(own, self._comm)
        links = match_ends([rank["connections"] for rank in ranks], self._comm.server_ends)
        everyone = self._comm.world_size * (self._comm.world_size - 1)
        if not self._steps or len(links) < everyone:
            return None
        used = [link for link in links if link["sent_bytes"] or link["received_bytes"]]  # On 100 ranks, few of 9,900.
        return {"steps": self._steps, "links": used, "interfaces": _interfaces(ranks)}

    def _read(self) -> SocketReading:
        found = connections(self._comm.sockets)
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


def match_ends(
    ranks: Sequence[Sequence[Sequence[Any]]], silent: Mapping[Ends, int] | None = None
) -> list[dict[str, int]]:
    """What went from rank to rank, from each rank's connections: their ends, bytes sent, received and sent again.

    `silent` are the ends of ranks that do not count: what the other end sent them, they have received.

    A connection without an other end among the ranks is nobody's: something else opened it, or addresses are translated
    on the way.
    """
    silent = silent or {}
    owners = {(local, remote): rank for rank, own in enumerate(ranks) for local, remote, *_ in own} | {**silent}
    links: dict[tuple[int, int], Counter[str]] = {}
    for rank, own in enumerate(ranks):
        for local, remote, sent, received, resent in own:
            peer = owners.get((remote, local))
            if peer is None or peer == rank:
                continue
            links.setdefault((rank, peer), Counter()).update(sent_bytes=sent, retransmitted_bytes=resent)
            links.setdefault((peer, rank), Counter()).update(received_bytes=received)
            if (remote, local) in silent:
                links[rank, peer].update(received_bytes=sent)
                links[peer, rank].update(sent_bytes=received, retransmitted_bytes=0)
    return [{"source": source, "target": target, **counts} for (source, target), counts in sorted(links.items())]


def _interfaces(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The counters of each host's interface, as its first rank read them."""
    hosts: dict[tuple[str, str], list[int]] = {}
    for number, rank in enumerate(ranks):
        if rank["on_interface"] is not None:
            hosts.setdefault((rank["network"], rank["interface"]), []).append(number)
    return [
        {"name": interface, "ranks": members, **ranks[members[0]]["on_interface"]}
        for (_, interface), members in hosts.items()
    ]
