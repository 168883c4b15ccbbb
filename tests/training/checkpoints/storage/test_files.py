"""Damage to any file is found: truncation at every place, a flipped bit in every byte, files of other kinds."""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import xxhash

from paceline.records.checkpoint import TENSOR_FILES, CheckpointContent
from paceline.training.checkpoints.storage import CheckpointFolder
from paceline.training.checkpoints.storage.files import DamagedError, OtherFormatError, read_content, read_tensors
from paceline.training.checkpoints.storage.reading import read_checkpoint
from training.checkpoints.storage.states import GROUPS, info, state

FILES = ["checkpoint.json", *TENSOR_FILES]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = CheckpointFolder(tmp_path_factory.mktemp("written"))
    return folder.write(state(), GROUPS, info(3, extra={"epochs": (1, 2)}))


@pytest.fixture
def path(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / written.name))


def test_all_files_are_there(path: Path) -> None:
    assert sorted(file.name for file in path.iterdir()) == sorted(FILES)
    assert read_checkpoint(path).info.step == 3


def test_files_can_be_read_by_those_who_can_read_the_folder(written: Path) -> None:
    for name in FILES:
        assert stat.S_IMODE((written / name).stat().st_mode) == stat.S_IMODE(written.stat().st_mode) & 0o666


@pytest.mark.parametrize("name", FILES)
def test_truncation_at_every_place_is_found(path: Path, name: str) -> None:
    content = (path / name).read_bytes()
    end = len(content) - 1 if name == "checkpoint.json" else len(content)  # Its last byte is a line break.
    for length in range(end):
        (path / name).write_bytes(content[:length])
        with pytest.raises(DamagedError):
            read_checkpoint(path)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_in_every_byte_is_found(path: Path, name: str) -> None:
    content, draw = (path / name).read_bytes(), random.Random(0)
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << draw.randrange(8)
        (path / name).write_bytes(flipped)
        with pytest.raises(DamagedError):
            read_checkpoint(path)


def remove(file: Path) -> None:
    file.unlink()


def empty(file: Path) -> None:
    file.write_bytes(b"")


def replace_by_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def replace_by_a_link(file: Path) -> None:
    file.rename(file.parent.parent / file.name)
    file.symlink_to(file.parent.parent / file.name)


def replace_by_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (remove, "is missing"),
    (empty, "is empty|has 0 bytes instead of"),
    (replace_by_a_folder, "is a folder, not a file"),
    (replace_by_a_link, "is a symbolic link, not a file"),
    (replace_by_a_pipe, "is a special file, not a file"),
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("damage", "found"), DAMAGE, ids=[damage.__name__ for damage, _ in DAMAGE])
def test_a_file_of_another_kind_is_found(path: Path, name: str, damage: Callable[[Path], None], found: str) -> None:
    damage(path / name)
    with pytest.raises(DamagedError, match=f"{name} ({found})"):
        read_checkpoint(path)


def rewrite(path: Path, change: Callable[[dict], None], version: int = 1) -> None:  # type: ignore[type-arg]
    """Change the content of `checkpoint.json`, with a checksum that fits."""
    content = msgspec.json.decode(
        msgspec.json.decode((path / "checkpoint.json").read_bytes(), type=dict[str, msgspec.Raw])["checkpoint"]
    )
    change(content)
    raw = msgspec.json.encode(content)
    whole = {"format": version, "checksum": xxhash.xxh3_64_hexdigest(raw), "checkpoint": msgspec.Raw(raw)}
    (path / "checkpoint.json").write_bytes(msgspec.json.encode(whole))


def test_another_version_of_the_format_is_named(path: Path) -> None:
    rewrite(path, lambda _: None, version=2)
    with pytest.raises(OtherFormatError, match="it has format 2, and this version of Paceline reads format 1"):
        read_checkpoint(path)


def test_unknown_keys_are_ignored(path: Path) -> None:
    rewrite(path, lambda content: content.update(later="more"))
    assert read_checkpoint(path).info.step == 3


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "secret.safetensors", ""])
def test_a_name_cannot_leave_the_folder(path: Path, name: str) -> None:
    shutil.copy(path / "model.safetensors", path.parent / "secret.safetensors")
    rewrite(path, lambda content: content["files"].update({name: content["files"]["model.safetensors"]}))
    with pytest.raises(DamagedError, match="which is not a file of a checkpoint"):
        read_checkpoint(path)


CHANGES: list[tuple[Callable[[dict], object], str]] = [  # type: ignore[type-arg]
    (lambda content: content.pop("info"), "checkpoint has no info"),
    (lambda content: content["info"].update(step=-1), r"checkpoint.info.step is not a whole number, 0 or more"),
    (lambda content: content["files"].pop("model.safetensors"), "it names the tensor"),
    (lambda content: content["model"].update(bias={"$tensor": "other"}), "it names the tensor 'other'"),
    (lambda content: content["param_groups"].append(3), r"checkpoint.param_groups\[1\] is a whole number"),
    (lambda content: content.update(per_rank={"$float": "nan"}), "it has nan in place of a mapping"),
    (lambda content: content.update(per_rank={"$pairs": [[{}, 1]]}), "unhashable"),
    (lambda content: content["model"]["tied.weight"].update({"$strides": [1 << 70] * 4}), "strides"),
]


@pytest.mark.parametrize(("change", "found"), CHANGES, ids=[found for _, found in CHANGES])
def test_content_that_does_not_fit_is_refused(path: Path, change: Callable[[dict], None], found: str) -> None:  # type: ignore[type-arg]
    rewrite(path, change)
    with pytest.raises(DamagedError, match=found):
        read_checkpoint(path)


def test_tensors_do_not_depend_on_their_file(path: Path) -> None:
    tensors = read_tensors(path, read_content(path, CheckpointContent).files)["model.safetensors"]
    file = path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.write(b"\xff" * file.stat().st_size)
    assert torch.equal(tensors["bias"], torch.ones(3))
    assert str(file) not in Path("/proc/self/maps").read_text()
