"""Tests of the digits that are part of the package."""

import hashlib
import lzma
from pathlib import Path

import pytest
import torch

from paceline.errors import DataError
from paceline.workloads import data
from paceline.workloads.data import digits


def test_split_shape_and_normalisation(tmp_path: Path) -> None:
    data.prepare("digits", data_dir=tmp_path)
    train, test = data.load("digits", data_dir=tmp_path)
    assert not list(tmp_path.iterdir())
    assert (train.images.shape, test.images.shape) == ((1437, 3, 32, 32), (360, 3, 32, 32))
    assert (train.classes, train.flip, train.crop_padding) == (10, False, 0)
    assert torch.bincount(train.labels).tolist() == pytest.approx([143.7] * 10, abs=12)
    pixels, _ = train.batch(torch.arange(len(train)), seed=0, epoch=0)
    assert pixels.mean().item() == pytest.approx(0, abs=1e-3)
    assert pixels.std().item() == pytest.approx(1, abs=1e-3)


def test_every_fifth_sample_is_for_testing(tmp_path: Path) -> None:
    rows = torch.frombuffer(bytearray(lzma.decompress(digits.FILE.read_bytes())), dtype=torch.uint8).view(-1, 65)
    train, test = data.load("digits", data_dir=tmp_path)
    assert torch.equal(test.labels, rows[::5, 0].long())
    assert torch.equal(train.labels[:8], rows[[1, 2, 3, 4, 6, 7, 8, 9], 0].long())


def test_pixels_span_all_greys_and_look_like_the_source(tmp_path: Path) -> None:
    rows = torch.frombuffer(bytearray(lzma.decompress(digits.FILE.read_bytes())), dtype=torch.uint8).view(-1, 65)
    _, test = data.load("digits", data_dir=tmp_path)
    assert (test.images.min(), test.images.max()) == (0, 255)
    source = rows[::5, 1:].view(-1, 1, 8, 8).double()
    expected = torch.nn.functional.interpolate(source, (32, 32), mode="bilinear") * 255 / 16
    assert (test.images.double() - expected).abs().max() <= 0.5


def test_the_text_beside_states_checksum_licence_and_source() -> None:
    about = digits.FILE.with_name("digits.txt").read_text()
    rows = lzma.decompress(digits.FILE.read_bytes())
    assert hashlib.sha256(rows).hexdigest() == digits.SHA256
    for fact in (digits.SHA256, "CC BY 4.0", "Alpaydin", "10.24432/C50P49"):
        assert fact in about


@pytest.mark.parametrize("damage", ["tampered", "truncated", "missing"])
def test_a_damaged_file_is_refused(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "digits.bin.xz"
    rows = lzma.decompress(digits.FILE.read_bytes())
    if damage == "tampered":
        file.write_bytes(lzma.compress(rows[:-1] + b"\x01"))
    elif damage == "truncated":
        file.write_bytes(digits.FILE.read_bytes()[:-100])
    monkeypatch.setattr(digits, "FILE", file)
    with pytest.raises(DataError, match=r"digits\.bin\.xz"):
        data.load("digits", data_dir=tmp_path)
