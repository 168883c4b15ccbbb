"""Parsers of data sets: CIFAR-10's rows and archive, SVHN's MATLAB files, and the list of checked files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
from scipy.io import savemat

from fuzzing.mutations import change_bytes, change_json
from fuzzing.parser import Parser, Prepared
from paceline.errors import DataError
from paceline.workloads.data import cifar10, svhn
from paceline.workloads.data.archive import ArchiveMember, extract
from paceline.workloads.data.checksums import CACHE_NAME, is_intact
from paceline.workloads.data.download import Remote
from workloads.data.published import cifar_rows, md5, tar_gz


def _prepare_cifar10(folder: Path) -> Prepared:
    file = folder / "data_batch_3.bin"

    def parse(content: bytes) -> None:
        file.write_bytes(content)
        rows = cifar10.read_rows(file)
        assert rows.tobytes() == content
        assert rows[:, 0].max() <= 9

    return Prepared([cifar_rows(2, seed=2), cifar_rows(1, seed=3)], parse)


def _prepare_svhn(folder: Path) -> Prepared:
    """Read a published file. Another one must never reach scipy's reader, which crashes on some damaged files."""
    buffer, count = io.BytesIO(), 2
    pixels = np.random.default_rng(count).integers(256, size=(32, 32, 3, count), dtype=np.uint8)
    savemat(buffer, {"X": pixels, "y": np.ones((count, 1), dtype=np.uint8)}, do_compression=True)
    published = buffer.getvalue()
    remote = Remote(url="https://server/test_32x32.mat", md5=md5(published))

    def parse(content: bytes) -> None:
        (folder / remote.name).write_bytes(content)
        found, labels = svhn.read_mat(folder / remote.name, remote)
        assert content == published
        assert np.array_equal(found, pixels.transpose(3, 2, 0, 1))
        assert labels.tolist() == [1, 1]

    return Prepared([published], parse)


def _prepare_archive(folder: Path) -> Prepared:
    rows = cifar_rows(1, seed=4)
    members = [ArchiveMember(f"d/{name}", folder / name, md5(rows)) for name in ("a", "b")]

    def parse(content: bytes) -> None:
        (folder / "archive.tar.gz").write_bytes(content)
        extract(folder / "archive.tar.gz", members, member_bytes=len(rows))
        assert [(folder / name).read_bytes() for name in ("a", "b")] == [rows, rows]

    return Prepared([tar_gz({"d/a": rows, "other": b"", "d/b": rows})], parse)


def _prepare_cache(folder: Path) -> Prepared:
    file = folder / "file"
    file.write_bytes(b"content")

    def parse(content: bytes) -> None:
        (folder / CACHE_NAME).write_bytes(content)
        assert is_intact(file, md5(b"content"))

    is_intact(file, md5(b"content"))
    seed = (folder / CACHE_NAME).read_bytes()
    assert json.loads(seed)["file"]["md5"] == md5(b"content")
    return Prepared([seed], parse)


PARSERS = (
    Parser("CIFAR-10 file", _prepare_cifar10, change_bytes, "data_batch_3.bin", DataError, weight=40),
    Parser("SVHN file", _prepare_svhn, change_bytes, "test_32x32.mat", DataError, weight=30),
    Parser("CIFAR-10 archive", _prepare_archive, change_bytes, "archive.tar.gz", DataError, weight=20),
    Parser("checked files", _prepare_cache, change_json, error=DataError, weight=10),
)
