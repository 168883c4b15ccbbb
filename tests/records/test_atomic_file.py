"""A file that is written atomically is complete, or as before."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.records.atomic_file import atomic_file


def test_the_file_is_not_changed_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("before")
    with atomic_file(path) as temporary:
        temporary.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_an_error_leaves_the_file_as_before(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "summary.json"
    path.write_text("before")

    def write() -> None:
        with atomic_file(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(type(error)):
        write()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def write() -> None:
        with atomic_file(tmp_path / "file" / "summary.json") as temporary:
            temporary.write_text("")

    with pytest.raises(NotADirectoryError):
        write()
