"""Contents of a checkpoint in memory: a state and its description, as JSON values and tensors by file, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.records.checkpoint import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    OTHER_FILE,
    CheckpointContent,
    CheckpointInfo,
    StoredFile,
)
from paceline.strategies.base.strategy import State
from paceline.training.checkpoints.storage.encoding import ValueDecoder, ValueEncoder

ParamGroups = Sequence[Mapping[str, Any]]
"""Parameter groups of an optimiser, each with the names of its parameters instead of the parameters."""
TensorsByFile = dict[str, dict[str, Tensor]]
KEPT_HINT = "checkpoints keep dense tensors, numbers, text, lists, tuples and dicts"


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was read. Its tensors are on the CPU and independent of its files."""

    state: State
    param_groups: list[dict[str, Any]]
    info: CheckpointInfo
    path: Path
    warnings: tuple[str, ...] = field(default=())
    """A sentence for each newer checkpoint that is damaged, if it was chosen as the newest valid one of a folder."""


@dataclass(frozen=True)
class EncodedCheckpoint:
    """A checkpoint ready to be written. Its values are copies; its tensors are those of the state, not copied."""

    info: CheckpointInfo
    model: dict[str, Any]
    optimizer: dict[str, dict[str, Any]]
    param_groups: list[dict[str, Any]]
    per_rank: dict[str, Any]
    tensors: TensorsByFile

    @classmethod
    def of(cls, state: State, param_groups: ParamGroups, info: CheckpointInfo) -> EncodedCheckpoint:
        """Encode a state; raise a CheckpointError that names what cannot be kept."""
        model, optimizer, other = ValueEncoder(), ValueEncoder(), ValueEncoder()
        encoded = cls(
            model=encode_model(state.model, model),
            optimizer={
                name: optimizer.encode(values, (name,), "the state of the optimiser")
                for name, values in state.optimizer.items()
            },
            param_groups=optimizer.encode(
                [dict(group) for group in param_groups], ("param_groups",), "the parameter groups of the optimiser"
            ),
            per_rank=other.encode(state.per_rank, ("per_rank",), "the strategy's state of single ranks"),
            info=_copied_info(
                info,
                loop=other.encode(info.loop, ("loop",), "the state of the training loop"),
                extra=other.encode(info.extra, ("extra",), "the value given as extra"),
            ),
            tensors={MODEL_FILE: model.tensors, OPTIMIZER_FILE: optimizer.tensors, OTHER_FILE: other.tensors},
        )
        _json(encoded.content(0, {}))  # Whatever JSON lacks is found here, before anything is written.
        return encoded

    def content(self, sequence: int, files: dict[str, StoredFile]) -> CheckpointContent:
        """Return the content of `checkpoint.json`."""
        return CheckpointContent(
            sequence=sequence,
            files=files,
            info=self.info,
            model=self.model,
            optimizer=self.optimizer,
            param_groups=self.param_groups,
            per_rank=self.per_rank,
        )


def encode_model(model: Mapping[str, Any], encoder: ValueEncoder) -> dict[str, Any]:
    """Encode a model's state_dict in its order. Of tied names, the first in alphabetical order names the tensor.

    `safetensors.torch.save_model` and `load_model` choose the same name.
    """
    encoded = {name: encoder.encode(model[name], (name,), "the model") for name in sorted(model)}
    return {name: encoded[name] for name in model}


def check_keepable(state: State, param_groups: ParamGroups = (), extra: Any = None) -> None:
    """Raise a CheckpointError that names the first tensor or value that a checkpoint cannot keep."""
    info = CheckpointInfo(
        step=0, epoch=0, epoch_samples=0, samples=0, strategy="", ranks=1, config={}, extra=extra, time=0.0, versions={}
    )
    EncodedCheckpoint.of(state, param_groups, info)


def decode_checkpoint(content: CheckpointContent, tensors: TensorsByFile, path: Path) -> Loaded:
    """Return the state that was encoded; raise ValueError for JSON that does not fit."""
    model, optimizer, other = (ValueDecoder(tensors.get(file, {})) for file in (MODEL_FILE, OPTIMIZER_FILE, OTHER_FILE))
    state = State(
        model={name: model.decode(value) for name, value in content.model.items()},
        optimizer={name: _dict(optimizer.decode(values)) for name, values in content.optimizer.items()},
        per_rank=_dict(other.decode(content.per_rank)),
    )
    info = msgspec.structs.replace(
        content.info, loop=_dict(other.decode(content.info.loop)), extra=other.decode(content.info.extra)
    )
    groups = [_dict(optimizer.decode(group)) for group in content.param_groups]
    return Loaded(state, groups, info, path)


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"it has {value!r} in place of a mapping")
    return value


def _copied_info(info: CheckpointInfo, loop: dict[str, Any], extra: Any) -> CheckpointInfo:
    """Return a copy of the description that later changes of the caller's values do not reach."""
    replaced = msgspec.structs.replace(info, loop=loop, extra=extra)
    return msgspec.json.decode(_json(replaced), type=CheckpointInfo)


def _json(value: Any) -> bytes:
    return _guarded(lambda: msgspec.json.encode(value))


def _guarded(encode: Callable[[], bytes]) -> bytes:
    try:
        return encode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"a value cannot be kept in a checkpoint: {error}.",
            hint=KEPT_HINT,
        ) from None
