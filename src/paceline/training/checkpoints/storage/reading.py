"""Read one checkpoint, with all checks."""

from __future__ import annotations

from pathlib import Path

from paceline.records.checkpoint import CheckpointContent
from paceline.training.checkpoints.storage.contents import Loaded, decode_checkpoint
from paceline.training.checkpoints.storage.files import DamagedError, read_content, read_tensors


def read_checkpoint(path: Path) -> Loaded:
    """Read a checkpoint and verify its checksums; raise DamagedError."""
    content = read_content(path, CheckpointContent)
    tensors = read_tensors(path, content.files)
    try:
        return decode_checkpoint(content, tensors, path)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise DamagedError(f"checkpoint.json is damaged: {error}") from None
