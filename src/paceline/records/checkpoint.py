"""Models of `checkpoint.json`, the part of a checkpoint that is not tensors, and the names of its files.

A checkpoint is a folder `step-00001200` with this file and up to three files of tensors in the safetensors format:

    checkpoint.json          everything that is not a tensor; written last
    model.safetensors        parameters and buffers, by the names of the model's state_dict
    optimizer.safetensors    state of the optimiser, as PARAMETER/KEY, and tensors in its parameter groups
    other.safetensors        tensors of single ranks, of the training loop, and the user's own

A file without tensors is not written. Nested values, such as the state of an optimiser, are JSON as they are, except
what JSON lacks, which is an object with one of the keys `TENSOR`, `TUPLE`, `FLOAT` and `PAIRS`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from paceline.records.settings import Settings
from paceline.records.value_types import Count

FORMAT_VERSION = 1
"""Raised by a change that an older reader would misread."""
CHECKPOINT_FILE = "checkpoint.json"
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
OTHER_FILE = "other.safetensors"
TENSOR_FILES = (MODEL_FILE, OPTIMIZER_FILE, OTHER_FILE)
BEST_FILE = "best.json"
"""Beside the checkpoints: names the best one by validation."""

TENSOR = "$tensor"
"""Name of the tensor in its file."""
STRIDES = "$strides"
"""Strides of a tensor in memory, in elements, where it is dense but not contiguous, such as channels_last."""
TUPLE = "$tuple"
FLOAT = "$float"
"""Number that is not finite: nan, inf or -inf."""
PAIRS = "$pairs"
"""Keys and values of a mapping with keys that are not text, or that begin with `MARK`."""
MARK = "$"


class RandomStateInfo(Struct, frozen=True, kw_only=True):
    """State of the random number generators of one rank. Bytes are base64 in JSON, words are little-endian."""

    python: bytes
    """The 625 words of Python's `random`."""
    python_gauss: float | None = None
    """Second number of the pair that `random.gauss` made last; None if it was used."""
    numpy_key: bytes
    """The 624 words of numpy's global generator."""
    numpy_position: Count
    numpy_gauss: float | None = None
    torch_cpu: bytes
    cuda: bytes | None = None
    """Generator of the rank's GPU; None for a rank without one."""


class CheckpointInfo(Struct, frozen=True, kw_only=True):
    """Position of a run, and everything that continues it besides the model and the optimiser."""

    step: Count
    """Steps done."""
    epoch: Count
    """Epoch of the next step."""
    epoch_samples: Count
    """Samples of that epoch that are trained, over all ranks."""
    epoch_batches: Count = 0
    """Batches of that epoch that were read from an iterable; 0 if the data has a length."""
    samples: Count
    """Samples trained in total, over all ranks."""
    strategy: str
    """Strategy of the run that wrote it, with its options."""
    ranks: Count
    config: Settings
    """Settings of the run; empty in a user's own loop."""
    loop: dict[str, Any] = {}
    """Values of the training loop: learning-rate scheduler, scaler, best evaluation, skipped steps."""
    extra: Any = None
    """Value of the user."""
    random: list[RandomStateInfo] = []
    """One per rank, in the order of ranks."""
    time: float
    """Time of writing, in seconds since 1970."""
    versions: dict[str, str]


class StoredFile(Struct, frozen=True):
    """Size and checksum of a file of tensors."""

    bytes: Count
    checksum: str
    """XXH3-64 of its content, in hexadecimal."""


class CheckpointIndex(Struct, frozen=True, kw_only=True):
    """Part of `checkpoint.json` by which checkpoints are ordered and their files are found."""

    sequence: Count
    """Number of the checkpoint in its folder, in the order of writing. It differs from the order of steps after a run
    has been resumed from an older checkpoint."""
    files: dict[str, StoredFile]


class CheckpointContent(CheckpointIndex, frozen=True, kw_only=True):
    """Everything in `checkpoint.json` that the checksum covers."""

    info: CheckpointInfo
    model: dict[str, Any]
    """By name; tied names have the same tensor."""
    optimizer: dict[str, dict[str, Any]]
    """State by parameter name."""
    param_groups: list[dict[str, Any]]
    per_rank: dict[str, Any]


class CheckpointFile(Struct, frozen=True, kw_only=True):
    """`checkpoint.json` as a whole."""

    format: int
    checksum: str
    """XXH3-64 of the bytes of `checkpoint`, in hexadecimal."""
    checkpoint: msgspec.Raw


class BestCheckpoint(Struct, frozen=True):
    """`best.json`: the best checkpoint by validation."""

    step: Count
