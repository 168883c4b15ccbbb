"""Tests of malicious and damaged archives."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import DataError
from paceline.workloads.data.archive import ArchiveMember, extract
from workloads.data.published import md5, tar_gz

GOOD = b"good content"


def entry(name: str, *, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size
    return info


def write_tar(path: Path, *entries: tuple[tarfile.TarInfo, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for info, content in entries:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def wanted(folder: Path, name: str = "box/file") -> ArchiveMember:
    return ArchiveMember(name, folder / "file", md5(GOOD))


def test_only_the_member_asked_for_is_written(tmp_path: Path, file_names: Callable[[Path], set[str]]) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    write_tar(
        tmp_path / "a.tar.gz",
        (entry("../outside"), b"harm"),
        (entry(str(outside)), b"harm"),
        (entry("box/../../outside"), b"harm"),
        (entry("box/file", kind=tarfile.SYMTYPE, link=str(outside)), b""),
        (entry("box/file", kind=tarfile.LNKTYPE, link="../outside"), b""),
        (entry("box/file", kind=tarfile.DIRTYPE), b""),
        (entry("box/file", kind=tarfile.FIFOTYPE), b""),
        (entry("./box/file"), b"harm"),
        (entry("box/file"), b"x" * 101),
        (entry("box/other"), b"harm"),
        (entry("box/file"), GOOD),
    )
    extract(tmp_path / "a.tar.gz", [wanted(tmp_path / "out")], member_bytes=100)
    assert (tmp_path / "out" / "file").read_bytes() == GOOD
    assert not (tmp_path / "out" / "file").is_symlink()
    assert outside.read_bytes() == b"precious"
    assert file_names(tmp_path) == {"a.tar.gz", "outside", "out/file", "out/.verified.json"}


def test_a_link_in_the_target_place_is_replaced_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    (tmp_path / "file").symlink_to(outside)
    write_tar(tmp_path / "a.tar.gz", (entry("box/file"), GOOD))
    extract(tmp_path / "a.tar.gz", [wanted(tmp_path)], member_bytes=100)
    assert (outside.read_bytes(), (tmp_path / "file").read_bytes()) == (b"precious", GOOD)


def test_wrong_content_is_not_written(tmp_path: Path, file_names: Callable[[Path], set[str]]) -> None:
    write_tar(tmp_path / "a.tar.gz", (entry("box/file"), b"bad content!"))
    with pytest.raises(DataError, match=r"file has the md5"):
        extract(tmp_path / "a.tar.gz", [wanted(tmp_path)], member_bytes=100)
    assert file_names(tmp_path) == {"a.tar.gz"}


def test_a_member_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar.gz", (entry("box/file", kind=tarfile.SYMTYPE, link="/etc/passwd"), b""))
    with pytest.raises(DataError, match="does not contain box/file"):
        extract(tmp_path / "a.tar.gz", [wanted(tmp_path)], member_bytes=100)
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("kept", [0, 5, 200])
def test_broken_archives_are_named(tmp_path: Path, kept: int, file_names: Callable[[Path], set[str]]) -> None:
    noise = bytes((i * i * 7919 >> 3) & 255 for i in range(5_000))
    whole = tar_gz({"box/before": noise, "box/file": GOOD})
    assert len(whole) > 400
    (tmp_path / "a.tar.gz").write_bytes(whole[:kept])
    with pytest.raises(DataError, match=r"a\.tar\.gz (cannot be unpacked|does not contain)"):
        extract(tmp_path / "a.tar.gz", [wanted(tmp_path)], member_bytes=10_000)
    assert file_names(tmp_path) == {"a.tar.gz"}


def test_flipped_bits_are_found(tmp_path: Path) -> None:
    whole = bytearray(tar_gz({"box/file": GOOD}))
    whole[len(whole) // 2] ^= 0xFF
    (tmp_path / "a.tar.gz").write_bytes(whole)
    with pytest.raises(DataError):
        extract(tmp_path / "a.tar.gz", [wanted(tmp_path)], member_bytes=100)


def test_a_member_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    """No data set asks for such a member; if one did by mistake, the data filter would refuse it."""
    write_tar(tmp_path / "a.tar.gz", (entry("../file"), GOOD))
    with pytest.raises(DataError, match="cannot be unpacked"):
        extract(tmp_path / "a.tar.gz", [wanted(tmp_path, "../file")], member_bytes=100)
    assert not (tmp_path / "file").exists()
