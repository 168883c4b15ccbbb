"""Checkpoints on disk: the format, writing that survives a crash or a full disk, and reading with checksums.

`records/checkpoint.py` describes the files. Nothing here knows the training loop or a strategy: a `State` goes in, and
the same `State` comes out.
"""

from paceline.training.checkpoints.storage.async_writer import AsyncWriter
from paceline.training.checkpoints.storage.contents import Loaded, ParamGroups, check_keepable
from paceline.training.checkpoints.storage.folder import CheckpointFolder
from paceline.training.checkpoints.storage.load import load, read_info
from paceline.training.checkpoints.storage.weights import check_weights_file, checked_weights, save_weights

__all__ = [
    "AsyncWriter",
    "CheckpointFolder",
    "Loaded",
    "ParamGroups",
    "check_keepable",
    "check_weights_file",
    "checked_weights",
    "load",
    "read_info",
    "save_weights",
]
