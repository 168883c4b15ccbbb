"""Which numbers of ranks `scale` measures, and how it puts them on hosts."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import ScaleConfig
from paceline.errors import UsageError
from paceline.experiments.scaling.shapes import choose_shapes
from paceline.launch.launcher_process import LauncherProcess

ONE_HOST = LauncherProcess()
FOUR_HOSTS = LauncherProcess(launchers=4)
TORCHRUN = LauncherProcess(launchers=4, ranks=1, local_size=2, started_by="torchrun")


def shapes(launcher: LauncherProcess, cores: int = 4, **settings: Any) -> list[tuple[int, int]]:
    found = choose_shapes(ScaleConfig(**settings), launcher, on_one_host=cores)
    return [(shape.hosts, shape.ranks_per_host) for shape in found]


def test_ranks_of_one_host_are_on_it() -> None:
    assert shapes(ONE_HOST, ranks="2,4") == [(1, 1), (1, 2), (1, 4)], "one rank is always measured"
    assert shapes(ONE_HOST) == [(1, 1), (1, 2), (1, 4)]
    assert shapes(ONE_HOST, cores=6) == [(1, 1), (1, 2), (1, 4), (1, 6)]


def test_ranks_are_spread_over_hosts_first() -> None:
    assert shapes(FOUR_HOSTS) == [(1, 1), (2, 1), (4, 1)]
    assert shapes(FOUR_HOSTS, ranks="1,3,5,6,8") == [(1, 1), (3, 1), (1, 5), (3, 2), (4, 2)]


def test_the_same_ranks_can_be_put_on_fewer_hosts_too() -> None:
    assert shapes(FOUR_HOSTS, ranks="1,2,4", ranks_per_host="1,2") == [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2)]
    assert shapes(FOUR_HOSTS, ranks_per_host="2") == [(1, 1), (1, 2), (2, 2), (4, 2)]


def test_a_launcher_that_started_a_process_per_rank_sets_the_limit() -> None:
    assert shapes(TORCHRUN) == [(1, 1), (2, 1), (2, 2)]
    assert shapes(LauncherProcess(launchers=9, ranks=1, local_size=3)) == [(1, 1), (2, 1), (2, 2), (3, 3)], (
        "8 do not fit"
    )
    with pytest.raises(UsageError, match="8 ranks cannot be put evenly on 2 hosts with 2 ranks each"):
        shapes(TORCHRUN, ranks="8")


def test_ranks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="4 ranks cannot be put on 4 hosts with 3 on each"):
        shapes(FOUR_HOSTS, ranks="4", ranks_per_host="3")
    with pytest.raises(UsageError, match="7 ranks cannot be put on 4 hosts with 1 on each"):
        shapes(FOUR_HOSTS, ranks="7", ranks_per_host="1")
