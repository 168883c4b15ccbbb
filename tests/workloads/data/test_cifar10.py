"""Tests of CIFAR-10's binary files: reading, checks, extraction from the archive."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.errors import DataError
from paceline.workloads import data
from paceline.workloads.data import cifar10
from workloads.data.published import ROW_BYTES, Server, SmallCifar, cifar_rows, md5


def test_prepare_downloads_checks_and_load_reads(
    tmp_path: Path, server: Server, small_cifar: SmallCifar, file_names: Callable[[Path], set[str]]
) -> None:
    data.prepare("cifar10", data_dir=tmp_path / "new", progress=False)
    train, test = data.load("cifar10", data_dir=tmp_path / "new")
    assert (len(train), len(test)) == (15, 4)
    rows = np.frombuffer(b"".join(small_cifar.train.values()), dtype=np.uint8).reshape(-1, ROW_BYTES)
    assert train.labels.tolist() == rows[:, 0].tolist()
    assert np.array_equal(train.images.numpy(), rows[:, 1:].reshape(-1, 3, 32, 32))
    assert (train.crop_padding, train.flip, train.classes) == (4, True, 10)
    left = {f"{cifar10.FOLDER}/{name}" for name in (*small_cifar.files, ".verified.json")} | {".lock", ".verified.json"}
    assert file_names(tmp_path / "new") == left, "the archive is gone, nothing half-written is left"

    data.prepare("cifar10", data_dir=tmp_path / "new", progress=False)
    assert server.requests == ["cifar-10-binary.tar.gz"]


def test_only_missing_files_are_replaced(tmp_path: Path, small_cifar: SmallCifar) -> None:
    folder = small_cifar.write_files(tmp_path)
    kept = (folder / "data_batch_1.bin").stat().st_ino
    (folder / "test_batch.bin").unlink()
    data.prepare("cifar10", data_dir=tmp_path, progress=False)
    assert (folder / "test_batch.bin").read_bytes() == small_cifar.files["test_batch.bin"]
    assert (folder / "data_batch_1.bin").stat().st_ino == kept


def test_an_archive_that_the_user_put_there_is_used_and_kept(
    tmp_path: Path, server: Server, small_cifar: SmallCifar
) -> None:
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(small_cifar.archive)
    data.prepare("cifar10", data_dir=tmp_path, progress=False)
    assert len(data.load("cifar10", data_dir=tmp_path)[0]) == 15
    assert (tmp_path / "cifar-10-binary.tar.gz").exists()
    assert server.requests == []


def test_a_tampered_archive_is_refused(tmp_path: Path, small_cifar: SmallCifar) -> None:
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(small_cifar.archive + b"!")
    with pytest.raises(DataError, match=rf"cifar-10-binary\.tar\.gz has the md5 .* not {small_cifar.remote.md5}"):
        data.prepare("cifar10", data_dir=tmp_path, progress=False)
    assert not (tmp_path / cifar10.FOLDER).exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[::-1],
        lambda content: content[:999] + bytes([content[999] ^ 1]) + content[1000:],
    ],
    ids=["cut short", "reversed", "flipped bit"],
)
@pytest.mark.parametrize("use", [data.prepare, data.load])
def test_a_damaged_file_is_named_with_both_checksums(
    tmp_path: Path, small_cifar: SmallCifar, damage: Callable[[bytes], bytes], use: Callable[..., object]
) -> None:
    path = small_cifar.write_files(tmp_path) / "data_batch_2.bin"
    content = damage(path.read_bytes())
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        use("cifar10", data_dir=tmp_path)
    expected = cifar10.TRAIN_FILES["data_batch_2.bin"]
    assert caught.value.message == f"{path} has the md5 {md5(content)}, not {expected} as published."
    assert caught.value.hint == "delete it to download it again"


@pytest.mark.parametrize("rows", [cifar_rows(2, seed=0)[:-1], b""], ids=["cut short", "empty"])
def test_sizes_that_are_not_rows_are_refused(tmp_path: Path, rows: bytes) -> None:
    path = tmp_path / "rows.bin"
    path.write_bytes(rows)
    with pytest.raises(DataError, match=rf"rows\.bin has {len(rows):,} bytes, .* not a multiple of 3,073"):
        cifar10.read_rows(path)


def test_labels_beyond_nine_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.bin"
    path.write_bytes(cifar_rows(2, seed=0) + b"\x0a" + cifar_rows(1, seed=0)[1:])
    with pytest.raises(DataError, match=r"image 2 of .*rows\.bin has the label 10, not 0 to 9\."):
        cifar10.read_rows(path)


@pytest.mark.usefixtures("small_cifar")
def test_load_never_downloads(tmp_path: Path, server: Server) -> None:
    with pytest.raises(DataError, match=r"data_batch_1\.bin is missing") as caught:
        data.load("cifar10", data_dir=tmp_path)
    assert server.url("cifar-10-binary.tar.gz") in str(caught.value.hint)
    assert str(tmp_path) in str(caught.value.hint)
    assert "--data digits" in str(caught.value.hint)
    assert server.requests == []


def test_training_batches_differ_from_evaluation(tmp_path: Path, small_cifar: SmallCifar) -> None:
    small_cifar.write_files(tmp_path)
    train, _ = data.load("cifar10", data_dir=tmp_path)
    indices = torch.arange(15)
    assert not torch.equal(train.batch(indices, seed=0, epoch=0)[0], train.batch(indices, seed=0, epoch=None)[0])
