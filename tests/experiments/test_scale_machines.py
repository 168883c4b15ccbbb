"""Hosts that share a machine are found out, and ranks get threads accordingly."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import LaunchConfig
from paceline.experiments.scale_machines import Threads, are_bound, choose_threads, find_machines
from paceline.launch.seat import Hello, Shape

ON_ONE_MACHINE: dict[str, Any] = {"machines": [0], "bound": False, "machine_cores": 4.0, "host_cpus": None}
BOOT, OTHER = "5a0c", "77fe"


def hello(node: int, cores: list[int], network: str = f"{BOOT} net:[1]", seat: int | None = None) -> Hello:
    number = node if seat is None else seat
    return Hello(
        seat=number,
        node=node,
        local_rank=0,
        host="h",
        network=network,
        address="",
        versions={},
        cores=cores,
        settings={},
    )


@pytest.mark.parametrize(
    ("hellos", "quota", "machines"),
    [
        ([hello(0, [0, 1])], None, [0]),
        ([hello(0, [0, 1]), hello(1, [0, 1]), hello(2, [0, 1])], None, [0, 0, 0]),
        ([hello(0, [0, 1]), hello(1, [0, 1], f"{OTHER} net:[1]")], None, [0, 1]),
        ([hello(0, [0, 1]), hello(1, [2, 3])], None, [0, 1]),
        ([hello(0, [0, 1]), hello(1, [0, 1], f"{OTHER} net:[1]"), hello(2, [1, 2])], None, [0, 1, 0]),
        ([hello(0, [0], seat=0), hello(0, [1], seat=1), hello(1, [1], seat=2)], None, [0, 0]),
        ([hello(0, [0, 1]), hello(1, [0, 1], f"{BOOT} net:[2]")], None, [0, 0]),
        ([hello(0, [0, 1]), hello(1, [0, 1], f"{BOOT} net:[2]")], 1.0, [0, 1]),
        ([hello(0, [0, 1]), hello(1, [0, 1])], 1.0, [0, 0]),
    ],
)
def test_hosts_that_may_use_the_same_cores_are_one_machine(
    hellos: list[Hello], quota: float | None, machines: list[int]
) -> None:
    assert find_machines(hellos, emulated=False, quota=quota) == machines


@pytest.mark.parametrize(
    ("hellos", "bound"),
    [
        ([hello(0, [0, 1]), hello(1, [0, 1])], False),
        ([hello(0, [0, 1], seat=0), hello(0, [0, 1], seat=1)], False),
        ([hello(0, [0], seat=0), hello(0, [1], seat=1)], True),
    ],
)
def test_ranks_may_be_bound_to_cores_of_their_own(hellos: list[Hello], bound: bool) -> None:
    assert are_bound(hellos) == bound


def test_emulated_hosts_are_one_machine_whatever_its_quota() -> None:
    hellos = [hello(0, [0, 1]), hello(1, [0, 1], f"{BOOT} net:[2]")]
    assert find_machines(hellos, emulated=True, quota=1.0) == [0, 0]


@pytest.mark.parametrize(
    ("launch", "place", "most", "threads"),
    [
        ({}, {}, 4, Threads(1, 4)),
        ({}, {}, 2, Threads(2, 4)),
        ({}, {}, 8, Threads(1, 4)),
        ({"threads": 3}, {}, 4, Threads(3, 3)),
        ({}, {"host_cpus": 0.5}, 4, Threads(None, None)),
        ({}, {"machines": [0, 1]}, 4, Threads(None, None)),
        ({}, {"machines": [0, 0]}, 4, Threads(1, 2)),
        ({}, {"bound": True}, 4, Threads(None, None)),
    ],
)
def test_threads_are_such_that_more_ranks_have_more_cores(
    launch: dict[str, int], place: dict[str, Any], most: int, threads: Threads
) -> None:
    found = choose_threads([Shape(1, 1), Shape(1, most)], LaunchConfig(**launch), ON_ONE_MACHINE | place, 0)
    assert found == threads
