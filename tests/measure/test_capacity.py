"""Usable memory and disk space, on temporary cgroup trees of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.measure.capacity import MemoryLimit, available_memory_bytes, free_disk_bytes, memory_limits

GIB = 1 << 30
NO_LIMIT_V1 = 9223372036854771712


class Tree:
    """A cgroup file system with its /proc/self/cgroup."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "cgroup"
        self.own = folder / "self"

    def write(self, group: str, **files: object) -> None:
        folder = self.root / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / f"memory.{name}").write_text(f"{content}\n")

    def limits(self, *lines: str) -> list[MemoryLimit]:
        self.own.write_text("".join(f"{line}\n" for line in lines))
        return memory_limits(self.own, self.root)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_v2_with_files_that_the_kernel_can_drop(tree: Tree) -> None:
    tree.write("job", max=4 * GIB, current=3 * GIB, stat=f"anon {GIB}\ninactive_file {GIB}\nactive_file 5")
    assert tree.limits("0::/job") == [MemoryLimit(4 * GIB, 2 * GIB)]


def test_v1(tree: Tree) -> None:
    stat = "inactive_file 7\ntotal_inactive_file 100"
    tree.write("memory/job", limit_in_bytes=2 * GIB, usage_in_bytes=GIB, stat=stat)
    tree.write("memory", limit_in_bytes=NO_LIMIT_V1, usage_in_bytes=GIB)
    lines = ("5:cpu,cpuacct:/job", "4:memory:/job", "0::/")
    assert tree.limits(*lines) == [MemoryLimit(2 * GIB, GIB - 100)]


def test_v1_in_a_container_whose_group_is_mounted_as_the_root(tree: Tree) -> None:
    tree.write("memory", limit_in_bytes=GIB, usage_in_bytes=1000)
    assert tree.limits("4:memory:/docker/0123") == [MemoryLimit(GIB, 1000)]


def test_the_tightest_of_nested_limits_counts(tree: Tree) -> None:
    tree.write("a", max=8 * GIB, current=7 * GIB)
    tree.write("a/b", max="max", current=3 * GIB)
    tree.write("a/b/c", max=4 * GIB, current=2 * GIB)
    limits = tree.limits("0::/a/b/c")
    assert limits == [MemoryLimit(4 * GIB, 2 * GIB), MemoryLimit(8 * GIB, 7 * GIB)]
    assert available_memory_bytes(limits, free_bytes=16 * GIB) == GIB
    assert available_memory_bytes(limits, free_bytes=5) == 5


@pytest.mark.parametrize("content", ["max", "", "much"])
def test_a_value_that_is_not_a_number_is_no_limit(tree: Tree, content: str) -> None:
    tree.write("job", max=content, current=5)
    assert tree.limits("0::/job") == []


def test_without_cgroups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert memory_limits(tmp_path / "none", tmp_path) == []
    assert available_memory_bytes([], free_bytes=GIB) == GIB


def test_a_limit_that_is_used_up_leaves_nothing() -> None:
    assert available_memory_bytes([MemoryLimit(GIB, 2 * GIB)], free_bytes=GIB) == 0


def test_free_disk(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    assert free_disk_bytes(tmp_path) > 0
