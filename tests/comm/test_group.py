"""Hosts of a run: ranks are grouped by the host whose memory they share."""

from __future__ import annotations

from paceline.comm import Comm
from paceline.comm.group import group_by_host
from paceline.measure.host import memory_id, network_id
from ranks import Pool


def test_hosts_are_in_the_order_of_their_first_ranks() -> None:
    assert group_by_host(["3", "1", "3", "2", "1"]) == ((0, 2), (1, 4), (3,))


def test_another_network_is_another_host() -> None:
    assert memory_id().startswith(network_id()), "emulated hosts differ by their networks"


def hosts(comm: Comm) -> tuple[tuple[int, ...], ...]:
    return comm.hosts


def test_ranks_of_this_machine_share_it(pool: Pool) -> None:
    assert pool.run(hosts, 3) == [((0, 1, 2),)] * 3
