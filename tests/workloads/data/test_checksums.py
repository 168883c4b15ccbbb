"""Tests of files with a published md5."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.errors import DataError
from paceline.workloads.data.checksums import CACHE_NAME, is_intact, write_checked
from workloads.data.published import md5


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the files that were read to compute an md5."""
    names: list[str] = []
    real = hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda file, kind: names.append(Path(file.name).name) or real(file, kind)
    )
    return names


def test_an_intact_file_is_read_once(tmp_path: Path, digests: list[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode())
    for _ in range(3):
        assert is_intact(tmp_path / "a", md5(b"a"))
        assert is_intact(tmp_path / "b", md5(b"b"))
    assert digests == ["a", "b"]


def test_a_changed_file_is_read_again(tmp_path: Path, digests: list[str]) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one")
    assert is_intact(path, md5(b"one"))
    path.write_bytes(b"two")
    os.utime(path, ns=(0, 1))
    with pytest.raises(DataError, match=f"{path} has the md5 {md5(b'two')}, not {md5(b'one')}"):
        is_intact(path, md5(b"one"))
    assert is_intact(path, md5(b"two"))
    assert digests == ["a"] * 3


def test_another_expectation_is_checked(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    assert is_intact(tmp_path / "a", md5(b"one"))
    with pytest.raises(DataError):
        is_intact(tmp_path / "a", md5(b"other"))


@pytest.mark.parametrize("memory", ["", "[]", "{", '{"a": 1}'])
def test_a_broken_memory_is_ignored(tmp_path: Path, memory: str, digests: list[str]) -> None:
    (tmp_path / "a").write_bytes(b"one")
    (tmp_path / CACHE_NAME).write_text(memory)
    assert is_intact(tmp_path / "a", md5(b"one"))
    assert digests == ["a"]
    assert json.loads((tmp_path / CACHE_NAME).read_text())["a"]["size"] == 3


def test_a_missing_file_is_not_intact(tmp_path: Path) -> None:
    assert not is_intact(tmp_path / "none", md5(b""))
    assert not is_intact(tmp_path / "no folder" / "none", md5(b""))


def test_a_folder_in_its_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        is_intact(tmp_path, md5(b""))


def test_writing_is_remembered(tmp_path: Path, digests: list[str]) -> None:
    write_checked(tmp_path / "new" / "a", [b"on", b"e"], md5(b"one"), hint="")
    assert (tmp_path / "new" / "a").read_bytes() == b"one"
    assert is_intact(tmp_path / "new" / "a", md5(b"one"))
    assert digests == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError, ValueError])
def test_an_interrupted_writer_leaves_nothing(
    tmp_path: Path, kind: type[BaseException], file_names: Callable[[Path], set[str]]
) -> None:
    seen: list[set[str]] = []

    def chunks() -> Iterator[bytes]:
        yield b"half"
        seen.append(file_names(tmp_path))
        raise kind

    with pytest.raises(kind):
        write_checked(tmp_path / "a", chunks(), md5(b"half"), hint="")
    assert seen == [{"a.part"}]
    assert file_names(tmp_path) == set()


def test_wrong_content_never_gets_the_name(tmp_path: Path, file_names: Callable[[Path], set[str]]) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(DataError, match=f"md5 {md5(b'two')}, not {md5(b'one')}") as caught:
        write_checked(tmp_path / "a", [b"two"], md5(b"one"), hint="what to do")
    assert caught.value.hint == "what to do"
    assert (tmp_path / "a").read_bytes() == b"old"
    assert file_names(tmp_path) == {"a"}
