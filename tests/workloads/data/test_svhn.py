"""Tests of SVHN's MATLAB files: reading, checks, download."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from paceline.errors import DataError
from paceline.workloads import data
from paceline.workloads.data import svhn
from paceline.workloads.data.download import Remote
from workloads.data.published import Server, md5


def mat(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    savemat(buffer, {"X": pixels, "y": labels}, do_compression=True)
    return buffer.getvalue()


def pixels_of(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(256, size=(32, 32, 3, count), dtype=np.uint8)


def labels_of(count: int) -> np.ndarray:
    return (np.arange(count, dtype=np.uint8) % 10 + 1).reshape(-1, 1)


COUNTS = {"TRAIN": 12, "TEST": 5, "EXTRA": 7}


@pytest.fixture
def small_svhn(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    """Return a small SVHN on the local server."""
    for part, count in COUNTS.items():
        name = f"{part.lower()}_32x32.mat"
        server.files[name] = mat(pixels_of(count), labels_of(count))
        monkeypatch.setattr(svhn, part, Remote(url=server.url(name), md5=md5(server.files[name])))


@pytest.mark.usefixtures("small_svhn")
def test_images_are_upright_and_ten_means_zero(tmp_path: Path, server: Server) -> None:
    data.prepare("svhn", data_dir=tmp_path, progress=False)
    train, test = data.load("svhn", data_dir=tmp_path)
    assert train.labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    source = pixels_of(12)
    assert train.images[3, 2, 10, 20] == source[10, 20, 2, 3]
    assert np.array_equal(train.images.numpy(), source.transpose(3, 2, 0, 1))
    assert len(test) == 5
    assert (train.crop_padding, train.flip, train.classes) == (4, False, 10)
    assert sorted(server.requests) == ["test_32x32.mat", "train_32x32.mat"]


@pytest.mark.usefixtures("small_svhn")
def test_extra_comes_after_train(tmp_path: Path) -> None:
    data.prepare("svhn:extra=true", data_dir=tmp_path, progress=False)
    train, test = data.load("svhn:extra=true", data_dir=tmp_path)
    assert (len(train), len(test)) == (19, 5)
    assert np.array_equal(train.images[12:].numpy(), pixels_of(7).transpose(3, 2, 0, 1))
    assert train.labels[12:].tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train_32x32\.mat is missing") as caught:
        data.load("svhn", data_dir=tmp_path)
    assert f"{svhn.TRAIN.url} to {tmp_path / 'svhn'}" in str(caught.value.hint)


@pytest.mark.usefixtures("small_svhn")
@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"not a MATLAB file",
        lambda content: content[:-500],
        lambda content: content[:200] + bytes([content[200] ^ 1]) + content[201:],
        lambda _: mat(pixels_of(3), labels_of(4)),
    ],
    ids=["other", "cut short", "flipped bit", "another MATLAB file"],
)
def test_only_the_published_files_are_read(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """Every part checks the file, since the ranks of another host may have another copy."""
    data.prepare("svhn", data_dir=tmp_path, progress=False)
    path = tmp_path / "svhn" / "test_32x32.mat"
    content = damage(path.read_bytes())
    path.write_bytes(content)
    for use in (data.load, data.prepare):
        with pytest.raises(DataError) as caught:
            use("svhn", data_dir=tmp_path)
        assert caught.value.message == f"{path} has the md5 {md5(content)}, not {svhn.TEST.md5} as published."
        assert caught.value.hint == "delete it to download it again"
