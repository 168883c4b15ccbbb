"""Parsers of checkpoints: damaged files, and files that were made to have the right checksums."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
import xxhash

from fuzzing.mutations import change_bytes, change_json
from fuzzing.parser import Parser, Prepared
from paceline.errors import CheckpointError
from paceline.records.checkpoint import BEST_FILE, CHECKPOINT_FILE, FORMAT_VERSION, MODEL_FILE, TENSOR_FILES
from paceline.training.checkpoints.storage.folder import CheckpointFolder
from paceline.training.checkpoints.storage.load import load, read_info
from training.checkpoints.storage.states import GROUPS, info, state


def _write(folder: Path) -> Path:
    """Write a checkpoint with all its files, and return its folder."""
    written = info(5, loop={"scheduler": {"last_epoch": 5, "rates": (0.1, float("inf"))}}, extra={1: [2.5, None]})
    return CheckpointFolder(folder).write(state(), GROUPS, written, is_best=True)


def _prepare_damaged(folder: Path) -> Prepared:
    """Damage one file, with the checksum of the undamaged one."""
    path = _write(folder)
    files = [path / CHECKPOINT_FILE, *[path / name for name in TENSOR_FILES if (path / name).is_file()]]
    assert len(files) == 4, "the state has tensors for all files"
    seeds = [(file, file.read_bytes()) for file in files]

    def parse(change: tuple[Path, bytes]) -> None:
        file, content = change
        whole = file.read_bytes()
        file.write_bytes(content)
        try:
            read_info_and_load(path)
        finally:
            file.write_bytes(whole)

    return Prepared(seeds, parse)


def read_info_and_load(path: Path) -> None:
    """Read a checkpoint in both ways."""
    read_info(path)
    load(path)


def _change_file(change: tuple[Path, bytes], _: Sequence[object], random: Random) -> tuple[Path, bytes]:
    file, content = change
    return file, (change_json if file.suffix == ".json" else change_bytes)(content, [content], random)


def _prepare_forged(folder: Path) -> Prepared:
    """Change the content of `checkpoint.json`, with a checksum that fits."""
    path = _write(folder)

    def parse(content: bytes) -> None:
        checksum = xxhash.xxh3_64_hexdigest(content)
        head = f'{{"format":{FORMAT_VERSION},"checksum":"{checksum}","checkpoint":'.encode()
        (path / CHECKPOINT_FILE).write_bytes(head + content + b"}\n")
        read_info_and_load(path)

    return Prepared([msgspec.json.encode(_content(path))], parse)


def _prepare_forged_tensors(folder: Path) -> Prepared:
    """Change the file of the model's tensors, with the size and the checksum that fit."""
    path = _write(folder)
    content = _content(path)

    def parse(tensors: bytes) -> None:
        (path / MODEL_FILE).write_bytes(tensors)
        content["files"][MODEL_FILE] = {"bytes": len(tensors), "checksum": xxhash.xxh3_64_hexdigest(tensors)}
        written = msgspec.json.encode(content)
        whole = {"format": FORMAT_VERSION, "checksum": xxhash.xxh3_64_hexdigest(written)}
        (path / CHECKPOINT_FILE).write_bytes(msgspec.json.encode(whole | {"checkpoint": msgspec.Raw(written)}))
        load(path)

    return Prepared([(path / MODEL_FILE).read_bytes()], parse)


def _content(path: Path) -> dict[str, dict[str, object]]:
    content: dict[str, dict[str, object]] = json.loads((path / CHECKPOINT_FILE).read_bytes())["checkpoint"]
    return content


def _prepare_best(folder: Path) -> Prepared:
    _write(folder)

    def parse(content: bytes) -> None:
        (folder / BEST_FILE).write_bytes(content)
        CheckpointFolder(folder).best()

    return Prepared([(folder / BEST_FILE).read_bytes()], parse)


def change_tensors(content: bytes, others: Sequence[bytes], random: Random) -> bytes:
    """Change the header of a safetensors file, with a length that fits, or any of its bytes."""
    if random.randrange(2):
        return change_bytes(content, others, random)
    length = int.from_bytes(content[:8], "little")
    header = change_json(content[8 : 8 + length], [content], random)
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


PARSERS = (
    Parser("checkpoint, damaged", _prepare_damaged, _change_file, "step-00000005", CheckpointError, weight=40),
    Parser("checkpoint.json, forged", _prepare_forged, change_json, "step-00000005", CheckpointError, weight=50),
    Parser("safetensors, forged", _prepare_forged_tensors, change_tensors, "step-00000005", CheckpointError, weight=50),
    Parser("best.json", _prepare_best, change_json, weight=10),
)
