"""Hosts that share a machine are found out, and ranks get threads accordingly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.config import LaunchConfig
from paceline.experiments.scaling.machines import (
    DetectedMachines,
    ThreadCounts,
    are_bound,
    choose_threads,
    find_machines,
)
from paceline.launch.launcher_process import LauncherInfo, Shape

ON_ONE_MACHINE = DetectedMachines(emulated=None, host_cpus=None, machine_cores=4.0, machines=[0], ranks_pinned=False)
BOOT, OTHER = "5a0c", "77fe"


def info(node: int, cores: list[int], network: str = f"{BOOT} net:[1]", launcher: int | None = None) -> LauncherInfo:
    number = node if launcher is None else launcher
    return LauncherInfo(
        launcher=number,
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
    ("infos", "quota", "machines"),
    [
        ([info(0, [0, 1])], None, [0]),
        ([info(0, [0, 1]), info(1, [0, 1]), info(2, [0, 1])], None, [0, 0, 0]),
        ([info(0, [0, 1]), info(1, [0, 1], f"{OTHER} net:[1]")], None, [0, 1]),
        ([info(0, [0, 1]), info(1, [2, 3])], None, [0, 1]),
        ([info(0, [0, 1]), info(1, [0, 1], f"{OTHER} net:[1]"), info(2, [1, 2])], None, [0, 1, 0]),
        ([info(0, [0], launcher=0), info(0, [1], launcher=1), info(1, [1], launcher=2)], None, [0, 0]),
        ([info(0, [0, 1]), info(1, [0, 1], f"{BOOT} net:[2]")], None, [0, 0]),
        ([info(0, [0, 1]), info(1, [0, 1], f"{BOOT} net:[2]")], 1.0, [0, 1]),
        ([info(0, [0, 1]), info(1, [0, 1])], 1.0, [0, 0]),
    ],
)
def test_hosts_that_may_use_the_same_cores_are_one_machine(
    infos: list[LauncherInfo], quota: float | None, machines: list[int]
) -> None:
    assert find_machines(infos, emulated=False, quota=quota) == machines


@pytest.mark.parametrize(
    ("infos", "bound"),
    [
        ([info(0, [0, 1]), info(1, [0, 1])], False),
        ([info(0, [0, 1], launcher=0), info(0, [0, 1], launcher=1)], False),
        ([info(0, [0], launcher=0), info(0, [1], launcher=1)], True),
    ],
)
def test_ranks_may_be_bound_to_cores_of_their_own(infos: list[LauncherInfo], bound: bool) -> None:
    assert are_bound(infos) == bound


def test_emulated_hosts_are_one_machine_whatever_its_quota() -> None:
    infos = [info(0, [0, 1]), info(1, [0, 1], f"{BOOT} net:[2]")]
    assert find_machines(infos, emulated=True, quota=1.0) == [0, 0]


@pytest.mark.parametrize(
    ("launch", "place", "most", "threads"),
    [
        ({}, {}, 4, ThreadCounts(1, 4)),
        ({}, {}, 2, ThreadCounts(2, 4)),
        ({}, {}, 8, ThreadCounts(1, 4)),
        ({"threads": 3}, {}, 4, ThreadCounts(3, 3)),
        ({}, {"host_cpus": 0.5}, 4, ThreadCounts(None, None)),
        ({}, {"machines": [0, 1]}, 4, ThreadCounts(None, None)),
        ({}, {"machines": [0, 0]}, 4, ThreadCounts(1, 2)),
        ({}, {"ranks_pinned": True}, 4, ThreadCounts(None, None)),
    ],
)
def test_threads_are_such_that_more_ranks_have_more_cores(
    launch: dict[str, int], place: dict[str, Any], most: int, threads: ThreadCounts
) -> None:
    found = choose_threads([Shape(1, 1), Shape(1, most)], LaunchConfig(**launch), replace(ON_ONE_MACHINE, **place), 0)
    assert found == threads
