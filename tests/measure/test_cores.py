"""Usable cores, on temporary cgroup trees of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.config.emulation import EmulationInfo
from paceline.measure import cores
from paceline.measure.cores import cgroup_quota, threads_per_rank, usable_cores


class Tree:
    """A cgroup file system with its /proc/self/cgroup."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "cgroup"
        self.root.mkdir()
        self.own = folder / "self"

    def v2(self, group: str, limit: str) -> None:
        folder = self.root / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(limit + "\n")

    def v1(self, group: str, quota: int, period: int = 100_000) -> None:
        folder = self.root / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (folder / "cpu.cfs_period_us").write_text(f"{period}\n")

    def quota(self, *lines: str) -> float | None:
        self.own.write_text("".join(f"{line}\n" for line in lines))
        return cgroup_quota(self.own, self.root)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_v2(tree: Tree) -> None:
    tree.v2("job", "150000 100000")
    assert tree.quota("0::/job") == 1.5


def test_v2_in_a_container_sees_its_own_root(tree: Tree) -> None:
    tree.v2(".", "50000 100000")
    assert tree.quota("0::/") == 0.5


def test_v2_takes_the_tightest_of_nested_limits(tree: Tree) -> None:
    tree.v2("a", "200000 100000")
    tree.v2("a/b", "max 100000")
    tree.v2("a/b/c", "800000 100000")
    assert tree.quota("0::/a/b/c") == 2.0
    tree.v2("a/b/c", "100000 100000")
    assert tree.quota("0::/a/b/c") == 1.0
    assert tree.quota("0::/a/b") == 2.0


def test_v2_without_a_limit(tree: Tree) -> None:
    tree.v2("job", "max 100000")
    assert tree.quota("0::/job") is None


def test_v1(tree: Tree) -> None:
    tree.v1("cpu,cpuacct/job", 250_000)
    assert tree.quota("5:memory:/job", "4:cpu,cpuacct:/job", "0::/") == 2.5


def test_v1_under_the_name_of_the_controller_alone(tree: Tree) -> None:
    tree.v1("cpu/job", 30_000, 60_000)
    assert tree.quota("4:cpu,cpuacct:/job") == 0.5


def test_v1_takes_the_tightest_of_nested_limits(tree: Tree) -> None:
    tree.v1("cpu", -1)
    tree.v1("cpu/a", 300_000)
    tree.v1("cpu/a/b", -1)
    assert tree.quota("4:cpu:/a/b") == 3.0


def test_v1_in_a_container_names_a_group_it_cannot_see(tree: Tree) -> None:
    tree.v1("cpu", 400_000)
    assert tree.quota("4:cpu:/docker/0123abc") == 4.0


def test_v1_without_a_limit(tree: Tree) -> None:
    tree.v1("cpu/job", -1)
    assert tree.quota("4:cpu:/job") is None


def test_limits_of_other_controllers_and_groups_do_not_count(tree: Tree) -> None:
    tree.v1("cpuset/job", 100_000)
    tree.v1("cpu/other", 100_000)
    assert tree.quota("3:cpuset:/job", "4:cpu:/job", "1:name=systemd:/job") is None


def test_nothing_above_the_mount_counts(tree: Tree) -> None:
    (tree.root.parent / "cpu.max").write_text("100000 100000\n")
    tree.v2("job", "300000 100000")
    assert tree.quota("0::/job") == 3.0


def test_missing_files_are_no_limit(tree: Tree) -> None:
    assert cgroup_quota(tree.own, tree.root) is None
    assert tree.quota("0::/gone", "4:cpu:/gone") is None
    assert tree.quota() is None


@pytest.fixture
def eight_cores(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.setattr(cores, "CGROUP_ROOT", tree.root)
    monkeypatch.setattr(cores, "SELF_CGROUP", tree.own)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    tree.own.write_text("0::/job\n")
    return tree


def test_usable_cores_are_the_affinity_without_a_quota(eight_cores: Tree) -> None:
    assert usable_cores() == 8
    assert threads_per_rank(3) == 2
    assert eight_cores.quota("0::/job") is None


def test_usable_cores_are_the_lesser_of_affinity_and_quota(eight_cores: Tree) -> None:
    eight_cores.v2("job", "350000 100000")
    assert usable_cores() == 3.5
    assert (threads_per_rank(1), threads_per_rank(2), threads_per_rank(3), threads_per_rank(4)) == (3, 1, 1, 1)
    eight_cores.v2("job", "1600000 100000")
    assert usable_cores() == 8


def test_a_rank_has_a_thread_even_on_half_a_core(eight_cores: Tree) -> None:
    eight_cores.v2("job", "50000 100000")
    assert usable_cores() == 0.5
    assert threads_per_rank(2) == 1


def test_without_affinity_all_cores_count(eight_cores: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores() == 6
    assert eight_cores.own.is_file()


def test_an_emulated_host_has_its_share(eight_cores: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    emulation = EmulationInfo(spec="4", host=0, hosts=4, master="198.18.0.1:1", host_cpus=2.5)
    monkeypatch.setenv("PACELINE_EMULATED", emulation.variables()["PACELINE_EMULATED"])
    assert usable_cores() == 2.5
    assert (threads_per_rank(1), threads_per_rank(2)) == (2, 1)
    eight_cores.v2("job", "50000 100000")
    assert usable_cores() == 0.5


def test_emulated_hosts_without_shares_divide_the_cores(eight_cores: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    emulation = EmulationInfo(spec="3", host=0, hosts=3, master="198.18.0.1:1")
    monkeypatch.setenv("PACELINE_EMULATED", emulation.variables()["PACELINE_EMULATED"])
    assert usable_cores() == 8
    assert (threads_per_rank(1), threads_per_rank(2), threads_per_rank(4)) == (2, 1, 1)
    assert threads_per_rank(2, cores=8) == 4
    assert eight_cores.own.is_file()
