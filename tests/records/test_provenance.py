"""Provenance of a result: command, versions, commit."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy
import psutil
import pytest

from paceline.records import Provenance, provenance
from paceline.records.provenance import with_out


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_provenance_describes_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/paceline", "train", "--out", "my folder"])
    found = provenance()
    assert found.command == "paceline train --out 'my folder'"
    assert found.host == platform.node()
    assert found.python == platform.python_version()
    assert found.versions["numpy"] == numpy.__version__
    assert found.versions["torch"]
    assert found.versions["paceline"]
    assert found.memory_bytes == psutil.virtual_memory().total
    assert found.cpu_count == psutil.cpu_count()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}", found.time)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Provenance) == found


def test_the_cpu_is_named_as_the_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor\t: 0\nmodel name\t: Fast: CPU 3000\nprocessor\t: 1\nmodel name\t: other\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert provenance().cpu == "Fast: CPU 3000"


def test_without_proc_the_cpu_name_comes_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(platform, "processor", lambda: "some cpu")
    assert provenance().cpu == "some cpu"


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert provenance().versions == {"paceline": None, "torch": None, "numpy": None}


def test_the_commit_is_that_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "first")
    git(tmp_path, "tag", "v1")
    monkeypatch.chdir(tmp_path)
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert provenance().commit == commit
    (tmp_path / "file").write_text("two")
    assert provenance().commit == f"{commit}-dirty"


def test_outside_a_repository_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance().commit is None


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert provenance().commit is None


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("paceline compare", "paceline compare --out 'a b'"),
        ("paceline compare --out x --steps 3", "paceline compare --steps 3 --out 'a b'"),
        ("paceline compare --out=x 'my file'", "paceline compare 'my file' --out 'a b'"),
        ("paceline compare --script t.py -- --out y", "paceline compare --script t.py --out 'a b' -- --out y"),
    ],
)
def test_a_command_gets_the_folder_before_the_arguments_of_a_script(command: str, expected: str) -> None:
    assert with_out(command, Path("a b")) == expected
