"""Read one checkpoint, with all checks, or its description alone."""

from __future__ import annotations

from pathlib import Path

from paceline.records.checkpoint import CheckpointContent, CheckpointInfo
from paceline.training.checkpoints.storage.contents import Loaded, decode_checkpoint
from paceline.training.checkpoints.storage.files import DamagedError, check_sizes, read_content, read_tensors


def read_checkpoint(path: Path) -> Loaded:
    """Read a checkpoint and verify its checksums; raise DamagedError."""
    content = read_content(path, CheckpointContent)
    tensors = read_tensors(path, content.files)
    try:
        return decode_checkpoint(content, tensors, path)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise DamagedError(f"checkpoint.json is damaged: {error}") from None


def read_checkpoint_info(path: Path) -> CheckpointInfo:
    """Read the description of a checkpoint from `checkpoint.json`; raise DamagedError.

    The checksum of that file and the sizes of the others are verified, but no tensor is read: in `loop` and `extra`,
    values that JSON lacks are as they are in the file.
    """
    content = read_content(path, CheckpointContent)
    check_sizes(path, content.files)
    return content.info
