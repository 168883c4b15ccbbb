"""Ranks that each launcher starts, and the position of a launcher process."""

from __future__ import annotations

import pytest

from paceline.config import LaunchConfig
from paceline.errors import LaunchError, UsageError
from paceline.launch.launcher_process import LauncherInfo, LauncherProcess, Shape
from paceline.launch.rank_assignment import assign_ranks, find_launcher_process


def launcher_info(launcher: int, node: int, *, local_rank: int = 0, cores: tuple[int, ...] = (0, 1)) -> LauncherInfo:
    return LauncherInfo(launcher, node, local_rank, f"n{node}", f"net{node}", f"198.18.0.{node}", {}, list(cores), {})


HOSTS = [launcher_info(number, number) for number in range(4)]
"""Four hosts, each with one launcher."""
CYCLIC = [launcher_info(launcher, launcher % 2, local_rank=launcher // 2) for launcher in range(4)]
"""Four launchers of one rank each, distributed cyclically over two hosts."""


def test_a_host_starts_all_its_ranks() -> None:
    rank_ranges = assign_ranks(Shape(2, 3), LauncherProcess(launchers=4), HOSTS)
    assert [
        (rank_range.launcher, rank_range.first_rank, rank_range.ranks, rank_range.local_rank)
        for rank_range in rank_ranges
    ] == [(0, 0, 3, 0), (1, 3, 3, 0)]
    assert {
        (rank_range.group_world_size, rank_range.local_size, rank_range.ranks_on_cores) for rank_range in rank_ranges
    } == {(2, 3, 3)}


def test_ranks_of_one_host_are_consecutive_in_any_order_of_launchers() -> None:
    launcher = LauncherProcess(launchers=4, ranks=1, local_size=2, started_by="torchrun")
    rank_ranges = assign_ranks(Shape(2, 2), launcher, CYCLIC)
    assert [rank_range.launcher for rank_range in rank_ranges] == [0, 2, 1, 3]
    assert [rank_range.local_rank for rank_range in rank_ranges] == [0, 1, 0, 1]
    assert [rank_range.first_rank for rank_range in rank_ranges] == [0, 1, 2, 3]
    assert [rank_range.launcher for rank_range in assign_ranks(Shape(2, 1), launcher, CYCLIC)] == [0, 1]
    assert [rank_range.launcher for rank_range in assign_ranks(Shape(1, 2), launcher, CYCLIC)] == [0, 2]


def test_ranks_share_cores_unless_each_is_bound_to_its_own() -> None:
    launcher = LauncherProcess(launchers=2, ranks=1, local_size=2, started_by="slurm")
    free = [launcher_info(0, 0), launcher_info(1, 0, local_rank=1)]
    bound = [launcher_info(0, 0, cores=(0,)), launcher_info(1, 0, local_rank=1, cores=(1,))]
    assert [rank_range.ranks_on_cores for rank_range in assign_ranks(Shape(1, 2), launcher, free)] == [2, 2]
    assert [rank_range.ranks_on_cores for rank_range in assign_ranks(Shape(1, 2), launcher, bound)] == [1, 1]


@pytest.mark.parametrize(
    ("shape", "launcher"),
    [(Shape(5, 1), LauncherProcess(launchers=4)), (Shape(1, 3), LauncherProcess(launchers=4, ranks=1))],
)
def test_more_ranks_or_hosts_than_the_launch_has_are_refused(shape: Shape, launcher: LauncherProcess) -> None:
    with pytest.raises(UsageError, match=r"the run needs .* but the launch has"):
        assign_ranks(shape, launcher, HOSTS if launcher.ranks is None else CYCLIC)


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}


def test_the_position_from_torchruns_variables() -> None:
    launcher = find_launcher_process(LaunchConfig(), TORCHRUN)
    assert (launcher.number, launcher.launchers, launcher.ranks, launcher.node, launcher.hosts) == (3, 4, 1, 1, 2)
    assert (launcher.local_rank, launcher.local_size, launcher.is_leader) == (1, 2, False)
    assert find_launcher_process(LaunchConfig(ranks=4), TORCHRUN) == launcher


@pytest.mark.parametrize("options", [{"ranks": 2}, {"ranks_per_host": 4}, {"hosts": 2, "master": "127.0.0.1:1"}])
def test_options_that_differ_from_torchruns_are_refused(options: dict[str, object]) -> None:
    name = next(iter(options)).replace("_", "-")
    with pytest.raises(UsageError, match=f"--{name} .* was given, but torchrun started 4 ranks, 2 on this host"):
        find_launcher_process(LaunchConfig(**options), TORCHRUN)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [("WORLD_SIZE", "x"), ("WORLD_SIZE", "0"), ("RANK", "-1"), ("RANK", "4"), ("RANK", ""), ("LOCAL_WORLD_SIZE", "0")],
)
def test_invalid_torchrun_variables_are_named(name: str, value: str) -> None:
    with pytest.raises(LaunchError, match=rf"^{name} .*is '?{value}'?[,.]") as refused:
        find_launcher_process(LaunchConfig(), TORCHRUN | {name: value})
    assert "torchrun sets this variable" in (refused.value.hint or "")


def test_the_position_from_options() -> None:
    launcher = find_launcher_process(LaunchConfig(hosts=3, node_rank=2, master="198.18.0.1:29500"), {})
    assert (launcher.number, launcher.launchers, launcher.hosts, launcher.ranks, launcher.master) == (
        2,
        3,
        3,
        None,
        "198.18.0.1:29500",
    )
    assert find_launcher_process(LaunchConfig(), {}).is_leader
