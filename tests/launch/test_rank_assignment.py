"""Who starts which ranks."""

from __future__ import annotations

import pytest

from paceline.config import LaunchConfig
from paceline.errors import LaunchError, UsageError
from paceline.launch.launcher_process import LauncherInfo, LauncherProcess, Shape
from paceline.launch.rank_assignment import assign_ranks, find_launcher_process


def info(launcher: int, node: int, *, local_rank: int = 0, cores: tuple[int, ...] = (0, 1)) -> LauncherInfo:
    return LauncherInfo(launcher, node, local_rank, f"n{node}", f"net{node}", f"198.18.0.{node}", {}, list(cores), {})


HOSTS = [info(number, number) for number in range(4)]
"""Four hosts, each with one process that starts its ranks."""
CYCLIC = [info(launcher, launcher % 2, local_rank=launcher // 2) for launcher in range(4)]
"""Four ranks, dealt out over two hosts in turn."""


def test_a_host_starts_all_its_ranks() -> None:
    rank_ranges = assign_ranks(Shape(2, 3), LauncherProcess(launchers=4), HOSTS)
    assert [
        (rank_range.launcher, rank_range.first_rank, rank_range.ranks, rank_range.local_rank)
        for rank_range in rank_ranges
    ] == [(0, 0, 3, 0), (1, 3, 3, 0)]
    assert {(rank_range.rank_ranges, rank_range.local_size, rank_range.sharing) for rank_range in rank_ranges} == {
        (2, 3, 3)
    }


def test_ranks_of_one_host_stand_together_whatever_the_order_of_the_seats() -> None:
    launcher = LauncherProcess(launchers=4, ranks=1, local_size=2, started_by="torchrun")
    rank_ranges = assign_ranks(Shape(2, 2), launcher, CYCLIC)
    assert [rank_range.launcher for rank_range in rank_ranges] == [0, 2, 1, 3]
    assert [rank_range.local_rank for rank_range in rank_ranges] == [0, 1, 0, 1]
    assert [rank_range.first_rank for rank_range in rank_ranges] == [0, 1, 2, 3]
    assert [rank_range.launcher for rank_range in assign_ranks(Shape(2, 1), launcher, CYCLIC)] == [0, 1]
    assert [rank_range.launcher for rank_range in assign_ranks(Shape(1, 2), launcher, CYCLIC)] == [0, 2]


def test_ranks_share_cores_unless_each_is_bound_to_its_own() -> None:
    launcher = LauncherProcess(launchers=2, ranks=1, local_size=2, started_by="slurm")
    free = [info(0, 0), info(1, 0, local_rank=1)]
    bound = [info(0, 0, cores=(0,)), info(1, 0, local_rank=1, cores=(1,))]
    assert [rank_range.sharing for rank_range in assign_ranks(Shape(1, 2), launcher, free)] == [2, 2]
    assert [rank_range.sharing for rank_range in assign_ranks(Shape(1, 2), launcher, bound)] == [1, 1]


@pytest.mark.parametrize(
    ("shape", "launcher"),
    [(Shape(5, 1), LauncherProcess(launchers=4)), (Shape(1, 3), LauncherProcess(launchers=4, ranks=1))],
)
def test_more_than_there_is_cannot_be_had(shape: Shape, launcher: LauncherProcess) -> None:
    with pytest.raises(UsageError, match="are asked for, but there are"):
        assign_ranks(shape, launcher, HOSTS if launcher.ranks is None else CYCLIC)


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}


def test_the_seat_that_torchrun_gives() -> None:
    launcher = find_launcher_process(LaunchConfig(), TORCHRUN)
    assert (launcher.number, launcher.launchers, launcher.ranks, launcher.node, launcher.hosts) == (3, 4, 1, 1, 2)
    assert (launcher.local_rank, launcher.local_size, launcher.leads) == (1, 2, False)
    assert find_launcher_process(LaunchConfig(ranks=4), TORCHRUN) == launcher


@pytest.mark.parametrize("asked", [{"ranks": 2}, {"ranks_per_host": 4}, {"hosts": 2, "master": "127.0.0.1:1"}])
def test_what_torchrun_did_not_start_is_refused(asked: dict[str, object]) -> None:
    name = next(iter(asked)).replace("_", "-")
    with pytest.raises(UsageError, match=f"--{name} .* was given, but the launcher started 4 ranks, 2 on this host"):
        find_launcher_process(LaunchConfig(**asked), TORCHRUN)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [("WORLD_SIZE", "x"), ("WORLD_SIZE", "0"), ("RANK", "-1"), ("RANK", "4"), ("RANK", ""), ("LOCAL_WORLD_SIZE", "0")],
)
def test_what_torchrun_would_never_say_is_told_by_name(name: str, value: str) -> None:
    with pytest.raises(LaunchError, match=rf"^{name} .*is '?{value}'?[,.]") as refused:
        find_launcher_process(LaunchConfig(), TORCHRUN | {name: value})
    assert "torchrun sets it" in (refused.value.hint or "")


def test_the_seat_that_the_user_names() -> None:
    launcher = find_launcher_process(LaunchConfig(hosts=3, node_rank=2, master="198.18.0.1:29500"), {})
    assert (launcher.number, launcher.launchers, launcher.hosts, launcher.ranks, launcher.master) == (
        2,
        3,
        3,
        None,
        "198.18.0.1:29500",
    )
    assert find_launcher_process(LaunchConfig(), {}).leads
