"""CPU limits written to cgroups v1 and v2, on folders that imitate both, and removal of stale cgroups."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.launch.emulation import cgroup
from paceline.launch.emulation.cgroup import host_cgroups, quota_and_period_us, remove_stale


@pytest.fixture(autouse=True)
def plain_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delete the files of a cgroup before its folder; the kernel does that for real cgroups."""

    def remove(folder: Path) -> None:
        for file in folder.iterdir():
            file.unlink()
        os.rmdir(folder)  # noqa: PTH106

    monkeypatch.setattr(Path, "rmdir", remove)


def contents(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("cpus", "quota", "period"),
    [(0.5, 5_000, 10_000), (2.0, 20_000, 10_000), (0.1, 1_000, 10_000), (0.05, 1_000, 20_000), (0.01, 1_000, 100_000)],
)
def test_quota_and_period(cpus: float, quota: int, period: int) -> None:
    assert quota_and_period_us(cpus) == (quota, period)


def test_v1_creates_cgroups_below_that_of_the_process(tmp_path: Path) -> None:
    own = tmp_path / "self"
    own.write_text("4:memory:/m\n3:cpu,cpuacct:/job\n0::/\n")
    (tmp_path / "cpu,cpuacct" / "job").mkdir(parents=True)
    with host_cgroups(2, 0.5, self_cgroup=own, root=tmp_path) as folders:
        assert [folder.parent for folder in folders] == [tmp_path / "cpu,cpuacct" / "job"] * 2
        for folder in folders:
            assert contents(folder) == {"cpu.cfs_period_us": "10000", "cpu.cfs_quota_us": "5000"}
    assert not any(folder.exists() for folder in folders)


def test_v1_in_a_container_that_does_not_see_its_cgroup(tmp_path: Path) -> None:
    own = tmp_path / "self"
    own.write_text("3:cpu:/docker/0123\n")
    (tmp_path / "cpu").mkdir()
    with host_cgroups(1, 0.5, self_cgroup=own, root=tmp_path) as (folder,):
        assert folder.parent == tmp_path / "cpu"


@pytest.mark.parametrize(("before", "after"), [("memory", "+cpu"), ("cpuset cpu memory", "cpuset cpu memory")])
def test_v2_creates_cgroups_at_the_root(tmp_path: Path, before: str, after: str) -> None:
    own = tmp_path / "self"
    own.write_text("0::/user.slice/session-3.scope\n")
    root = tmp_path / "cgroup"
    root.mkdir()
    control = root / "cgroup.subtree_control"
    control.write_text(before + "\n")
    with host_cgroups(3, 1.5, self_cgroup=own, root=root) as folders:
        assert control.read_text().strip() == after
        assert len({folder.name for folder in folders}) == 3
        for folder in folders:
            assert folder.parent == root
            assert contents(folder) == {"cpu.max": "15000 10000"}
    assert list(root.iterdir()) == [control]


def test_cgroups_are_removed_after_an_exception(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("cpu")
    with (
        pytest.raises(ZeroDivisionError),
        host_cgroups(2, 0.5, self_cgroup=tmp_path / "none", root=tmp_path) as folders,
    ):
        _ = 1 / (2 - len([folder for folder in folders if folder.exists()]))
    assert not list(tmp_path.glob("paceline-*"))


def test_other_file_errors_are_not_converted(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("cpu")
    with pytest.raises(FileNotFoundError), host_cgroups(1, 0.5, self_cgroup=tmp_path / "none", root=tmp_path):
        (tmp_path.parent / "not there" / "x").read_text()


def test_without_cgroups_the_error_says_so(tmp_path: Path) -> None:
    with (
        pytest.raises(LaunchError, match=r"cannot limit emulated hosts: .*No such file") as caught,
        host_cgroups(1, 0.5, self_cgroup=tmp_path / "none", root=tmp_path),
    ):
        pass
    assert "--host-cpus" in (caught.value.hint or "")


def test_a_refused_limit_gives_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("cpu")

    def refuse(folder: Path, cpus: float) -> None:  # noqa: ARG001
        raise OSError(22, os.strerror(22), str(folder / "cpu.max"))

    monkeypatch.setattr(cgroup, "_set_quota", refuse)
    with (
        pytest.raises(
            LaunchError, match=r"cannot limit emulated hosts to 0\.5 cores: .*cpu\.max: Invalid argument"
        ) as caught,
        host_cgroups(1, 0.5, self_cgroup=tmp_path / "none", root=tmp_path),
    ):
        pass
    assert "smaller --host-cpus" in (caught.value.hint or "")
    assert not list(tmp_path.glob("paceline-*"))


def test_stale_cgroups_are_removed_and_others_kept(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    namespace, pid, start = cgroup._owner(os.getpid()).split("-")
    living = tmp_path / f"paceline-{namespace}-{pid}-{start}-0-host0"
    elsewhere = tmp_path / f"paceline-{int(namespace) + 1}-{dead.pid}-{start}-0-host0"
    other = tmp_path / "paceline-notes-host0"
    ended = tmp_path / f"paceline-{namespace}-{dead.pid}-{start}-0-host0"
    reused = tmp_path / f"paceline-{namespace}-{pid}-{int(start) - 1}-0-host3"
    for folder in (living, elsewhere, other, ended, reused):
        folder.mkdir()
    remove_stale(tmp_path)
    assert {folder.name for folder in tmp_path.iterdir()} == {living.name, elsewhere.name, other.name}
