"""Load a checkpoint, or its description, from the path of one, of a folder of them, or of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paceline.errors import CheckpointError
from paceline.records.checkpoint import CHECKPOINT_FILE, CheckpointInfo
from paceline.records.schema import CHECKPOINTS_FOLDER
from paceline.training.checkpoints.storage.contents import Loaded
from paceline.training.checkpoints.storage.files import DamagedError, OtherFormatError, describe_os_error
from paceline.training.checkpoints.storage.folder import CHECKPOINT_NAME, CheckpointFolder, ContentT
from paceline.training.checkpoints.storage.reading import read_checkpoint, read_checkpoint_info


def load(path: Path) -> Loaded:
    """Load one checkpoint, or the newest valid one of a `checkpoints` folder or of a run's folder.

    Raise a CheckpointError if there is none, or if the one that was named is damaged.
    """
    loaded, damaged = _read(path, read_checkpoint)
    return replace(loaded, warnings=tuple(damaged))


def read_info(path: Path) -> CheckpointInfo:
    """Read the description of the checkpoint that `load` would choose, without tensors: see `read_checkpoint_info`.

    A checkpoint whose tensors have the right size but another checksum is not noticed.
    """
    return _read(path, read_checkpoint_info)[0]


def _read(path: Path, read: Callable[[Path], ContentT]) -> tuple[ContentT, list[str]]:
    """Read the checkpoint that a path names; return it with a sentence for each newer one that is damaged."""
    try:
        if not path.is_dir():
            found = "is not a folder" if path.exists() else "does not exist"
            raise CheckpointError(f"{path} {found}, so there is no checkpoint to load.", hint=_HINT)
        if CHECKPOINT_NAME.fullmatch(path.name) or (path / CHECKPOINT_FILE).exists():
            return _read_one(path, read), []
        inner = path / CHECKPOINTS_FOLDER
        folder = inner if inner.is_dir() else path
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {describe_os_error(error)}.", hint=_HINT) from None
    content, damaged = CheckpointFolder(folder).newest_by(read)
    if content is None:
        reasons = " ".join(["", *damaged])
        hint = DAMAGED_HINT if damaged else _HINT
        raise CheckpointError(f"{folder} has no checkpoint that can be loaded.{reasons}", hint=hint)
    return content, damaged


def _read_one(path: Path, read: Callable[[Path], ContentT]) -> ContentT:
    try:
        return read(path)
    except OtherFormatError as error:
        raise CheckpointError(
            f"{path} cannot be loaded: {error}.", hint="load it with the version of Paceline that wrote it"
        ) from None
    except DamagedError as error:
        raise CheckpointError(
            f"{path} cannot be loaded: {error}.",
            hint=f"name the folder {path.parent} instead, for the newest checkpoint that is intact",
        ) from None


_HINT = "name a run's folder, its folder of checkpoints, or one checkpoint"
DAMAGED_HINT = "restore the checkpoints from a copy, or begin again in another folder"
