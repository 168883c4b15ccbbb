"""Save the weights of a model to one safetensors file, whose bytes depend on the weights alone."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from torch import Tensor

from paceline.errors import CheckpointError
from paceline.records.atomic_file import atomic_file
from paceline.training.checkpoints.storage.contents import encode_model
from paceline.training.checkpoints.storage.encoding import ValueEncoder
from paceline.training.checkpoints.storage.files import describe_os_error, hint_for, sync_folder, write_tensors
from paceline.training.checkpoints.storage.tensors import on_disk


def save_weights(model_state: Mapping[str, Any], file: Path) -> None:
    """Write a model's state_dict to a file, or raise a CheckpointError; an existing file is replaced at the end.

    Order of names, memory layout and device do not change the file. Of tied weights, which are one tensor under several
    names, the file has the first name in alphabetical order, as `safetensors.torch.save_model` has, and without its
    metadata, whose order is random: `safetensors.torch.load_model(model, file)` loads all of them.
    """
    weights = on_disk(checked_weights(model_state))
    with _explaining(file, "could not"):
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(file) as temporary:
            temporary.unlink(missing_ok=True)  # Of a process with the same id that was killed.
            write_tensors(temporary, weights)
        sync_folder(file.parent)


def check_weights_file(file: Path) -> None:
    """Raise a CheckpointError if `save_weights` cannot write to a file, so that no run is trained for nothing.

    Makes the folder of the file; an existing file stays as it is.
    """
    with _explaining(file, "cannot"):
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        with NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}."):
            pass


@contextmanager
def _explaining(file: Path, outcome: str) -> Iterator[None]:
    """Turn an error of the system into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"the weights {outcome} be written to {file}: {describe_os_error(error)}.", hint=hint_for(error)
        ) from None


def checked_weights(model_state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that `save_weights` would write; raise a CheckpointError for an entry that it cannot write."""
    for name, value in model_state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"the weights cannot be saved: {name} of the model's state_dict is a {type(value).__name__}, not a "
                "tensor.",
                hint="return a tensor from get_extra_state(), or use a checkpoint, which keeps other values too",
            )
    encoder = ValueEncoder()
    encode_model(model_state, encoder)
    return encoder.tensors
