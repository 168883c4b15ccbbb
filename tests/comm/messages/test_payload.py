"""Bytes that the kernel counts between ranks equal the plan of an operation, including framing.

The last part runs every strategy on emulated hosts and compares the sockets with the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from commands import paceline
from experiments_on_disk import read_comparison
from paceline.comm import Comm
from paceline.comm.messages.payload import PayloadCount, match_connections
from paceline.plans import Operation, Plan, Transfer
from paceline.plans.operations import gloo_operation
from paceline.records.summary import SocketLink, SocketTraffic
from paceline.report.terminal.comparison import to_json
from ranks import Pool
from registered import EXCHANGING, ON_CPUS

pytestmark = pytest.mark.takes(20)

MIB_ITEMS = 2**18
"""Items of four bytes in a MiB."""
WHOLE = {"all_reduce", "broadcast", "reduce", "reduce_scatter", "all_to_all"}
"""Operations whose size is that of one rank's tensor; that of the others is the total over all ranks."""

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Renamed in torch 2.13."""

Matrix = list[tuple[int, int, int]]


def operations(comm: Comm, items: int, root: int) -> dict[str, Callable[[], Any]]:
    """Return every collective operation on a tensor of `items` items."""
    ranks, group, own = comm.world_size, comm.group, torch.ones(items)
    outputs = [torch.empty(items) for _ in range(ranks)]
    at_root = outputs if comm.rank == root else None
    return {
        "all_reduce": lambda: dist.all_reduce(own, group=group),
        "broadcast": lambda: dist.broadcast(own, group_src=root, group=group),
        "reduce": lambda: dist.reduce(own, group_dst=root, group=group),
        "gather": lambda: dist.gather(own, at_root, group_dst=root, group=group),
        "scatter": lambda: dist.scatter(own, at_root, group_src=root, group=group),
        "all_gather": lambda: dist.all_gather(outputs, own, group=group),
        "reduce_scatter": lambda: reduce_scatter(torch.empty(items // ranks), own, group=group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(items), own, group=group),
        "barrier": lambda: dist.barrier(group=group),
    }


def counted(comm: Comm, action: Callable[[], Any], *, also: Callable[[], Any] = lambda: None) -> SocketTraffic | None:
    """Return the count of one window that contains an action."""
    payload = PayloadCount(comm)
    comm.control.barrier()
    payload.close_window(1, counts=False)
    action()
    comm.control.barrier()
    also()
    payload.close_window(1, counts=True)
    return payload.result()


def matrix_of(result: SocketTraffic | None) -> Matrix:
    assert result is not None
    links = result.links
    assert all(link.sent_bytes == link.received_bytes for link in links), "both ends have the same count"
    return [(link.source, link.target, link.received_bytes) for link in links if link.received_bytes]


def count_collectives(comm: Comm, items: int, root: int) -> dict[str, Matrix]:
    return {
        kind: matrix_of(counted(comm, action))
        for kind, action in operations(comm, items, root).items()
        if items % comm.world_size == 0 or kind not in ("reduce_scatter", "all_to_all")
    }


def planned(operation: Operation | None) -> Matrix:
    assert operation is not None
    links = Plan((operation,)).links()
    return [(link.source, link.target, link.payload_bytes + link.framing_bytes) for link in links]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("items", "root"), [(1, 0), (12, 1), (100, 0), (3001, 1), (12 * MIB_ITEMS // 5, 0), (9 * MIB_ITEMS, 1)]
)
def test_collectives_move_what_their_plan_says(pool: Pool, ranks: int, items: int, root: int) -> None:
    everywhere = pool.run(count_collectives, ranks, items, root)
    assert all(seen == everywhere[0] for seen in everywhere), "all ranks have the same result"
    rooted = {"broadcast", "reduce", "gather", "scatter"}
    for kind, seen in everywhere[0].items():
        size = 0 if kind == "barrier" else items * 4 * (1 if kind in WHOLE else ranks)
        assert seen == planned(gloo_operation(kind, size, ranks, root if kind in rooted else -1)), kind


def count_message(comm: Comm, items: int) -> Matrix:
    tensor = torch.ones(items)

    def action() -> None:
        if comm.rank == 2:
            dist.send(tensor, group_dst=1, group=comm.group)
        elif comm.rank == 1:
            dist.recv(tensor, group_src=2, group=comm.group)

    return matrix_of(counted(comm, action))


@pytest.mark.parametrize("items", [1, 1000])
def test_a_message_has_its_framing(pool: Pool, items: int) -> None:
    message = Operation("send", "direct", items * 4, (Transfer(2, 1, items * 4),), 0.0)
    assert pool.run(count_message, 3, items)[0] == planned(message) == [(1, 2, 48), (2, 1, items * 4 + 96)]


def count_other_traffic(comm: Comm) -> dict[str, Any]:
    """Count traffic on other groups, and in a discarded window."""
    half: Tensor = torch.ones(500)
    subgroup = comm.subgroup([0, 1]) if comm.world_size == dist.get_world_size() else None

    def in_subgroup() -> None:
        if comm.rank < 2:
            dist.all_reduce(half, group=subgroup)

    return {
        "control": matrix_of(counted(comm, lambda: comm.control.sum(torch.ones(1000)))),
        "subgroup": matrix_of(counted(comm, in_subgroup)),
        "discarded": counted_discarded(comm),
    }


def counted_discarded(comm: Comm) -> SocketTraffic | None:
    payload = PayloadCount(comm)
    payload.close_window(1, counts=False)
    if comm.rank == 1:
        payload.discard_window()
    payload.close_window(1, counts=True)
    return payload.result()


def test_only_the_groups_of_the_strategy_are_counted(pool: Pool) -> None:
    seen = pool.run(count_other_traffic, 4)[0]
    assert seen["control"] == [], "the control group is not counted"
    assert seen["subgroup"] == planned(gloo_operation("all_reduce", 2000, 2, -1))
    assert seen["discarded"] is None, "one rank discards the window for all"


def count_alone(comm: Comm) -> SocketTraffic | None:
    return counted(comm, lambda: dist.all_reduce(torch.ones(10), group=comm.group))


def test_a_rank_alone_sends_nothing(pool: Pool) -> None:
    (result,) = pool.run(count_alone, 1)
    assert result.links == []
    assert result.steps == 1


def count_on_interface(comm: Comm) -> SocketTraffic | None:
    return counted(comm, lambda: dist.all_reduce(torch.ones(MIB_ITEMS), group=comm.group))


def test_the_interface_counts_it_too(pool: Pool) -> None:
    result = pool.run(count_on_interface, 3)[0]
    payload = sum(link.received_bytes for link in result.links)
    (interface,) = result.interfaces  # One host, one entry.
    assert interface.name == "lo"
    assert interface.ranks == [0, 1, 2]
    assert interface.sent_bytes >= payload, "the interface also counts headers"
    assert interface.received_bytes >= payload


def test_a_connection_to_no_rank_is_ignored() -> None:
    first = ["10.0.0.1:1", "10.0.0.2:2", 10, 20, 1]
    second = ["10.0.0.2:2", "10.0.0.1:1", 20, 10, 0]
    stranger = ["10.0.0.1:3", "10.9.9.9:9", 1000, 1000, 0]
    assert match_connections([[first, stranger], [second]]) == [
        SocketLink(source=0, target=1, sent_bytes=10, retransmitted_bytes=1, received_bytes=10),
        SocketLink(source=1, target=0, received_bytes=20, sent_bytes=20, retransmitted_bytes=0),
    ]


# Emulated hosts: for every strategy, the sockets carry the plan and its framing.

HOSTS = 3
STRATEGIES = [*ON_CPUS, "ddp:bucket_mb=0.05"]
SENDING = [*EXCHANGING, "ddp:bucket_mb=0.05"]
HEADER_SHARE = 0.1
"""TCP, IP and Ethernet headers, acknowledgements and the loop's own messages add less than this share."""


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Result of `compare` for all strategies, with one rank on each of three emulated hosts."""
    out = tmp_path_factory.mktemp("proof") / "out"
    where = ("--emulate", f"{HOSTS}@500mbit", "--ranks-per-host", "1", "--threads", "1")
    what = ("cnn", "--strategies", ",".join(STRATEGIES), "--batch", "12", "--steps", "15", "--no-evaluate")
    how = ("--repeats", "1", "--max-repeats", "1", "--no-proof", "--no-doctor", "--out", str(out))
    done = paceline("compare", *what, *where, *how)
    assert "by the kernel's count" not in done.stdout + done.stderr, "printed if traffic differs from the plan"
    return to_json(read_comparison(out))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_pair_of_hosts_sends_what_was_planned(comparison: dict[str, Any], strategy: str) -> None:
    payload = comparison["payload"][strategy]
    assert payload["expected_from"] == "the plan"
    assert payload["steps"] == 10
    assert payload["deviation"] <= 0.01
    assert payload["holds"] is True
    planned_bytes = sum(rank["planned_sent_bytes"] for rank in payload["ranks"])
    assert (planned_bytes > 0) == (strategy in SENDING), "the plan is not empty"


@pytest.mark.parametrize("strategy", SENDING)
def test_the_interfaces_of_the_hosts_count_it_too(comparison: dict[str, Any], strategy: str) -> None:
    payload = comparison["payload"][strategy]
    assert [(host["interface"], host["ranks"]) for host in payload["hosts"]] == [
        ("eth0", [rank]) for rank in range(HOSTS)
    ]
    for host, rank in zip(payload["hosts"], payload["ranks"], strict=True):
        for counter in ("sent_bytes", "received_bytes"):
            assert rank[counter] <= host[counter] <= (1 + HEADER_SHARE) * rank[counter] + 20_000, (host, rank)


@pytest.mark.parametrize("strategy", ["gather_scatter", "p2p"])
def test_the_load_of_rank_0_is_measured(comparison: dict[str, Any], strategy: str) -> None:
    matrix = comparison["payload"][strategy]["matrix"]
    assert sum(matrix[0]) == pytest.approx((HOSTS - 1) * sum(matrix[1]))
    assert matrix[1][2] == matrix[2][1] == 0
    verdict = comparison["verdict"]
    assert any(strategy in line and "rank 0 sends and receives" in line and "measured" in line for line in verdict)
