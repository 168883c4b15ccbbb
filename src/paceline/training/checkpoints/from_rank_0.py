"""Checkpoint that rank 0 reads and sends to all ranks, and the state that each continues from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from paceline.comm import Comm
from paceline.comm.messages.nested import NestedMessage, receive_broadcast
from paceline.errors import CheckpointError, PacelineError
from paceline.records.checkpoint import CheckpointInfo
from paceline.strategies.base.strategy import State
from paceline.training.checkpoints.capture import load_param_groups, load_state
from paceline.training.checkpoints.storage.contents import KEPT_HINT, Loaded
from paceline.training.sync import Sync

OPTIMIZER = "optimizer"
"""Key of the class of the optimiser in what a checkpoint keeps of the loop."""


@dataclass(frozen=True)
class Found:
    """Checkpoint that was found on rank 0, and what else that rank has read."""

    loaded: Loaded | None
    """None if there is none."""
    warnings: list[str]
    """A sentence for each newer checkpoint that is damaged."""
    record: Any = None
    """JSON values of the run's record."""


@dataclass(frozen=True, kw_only=True)
class SentCheckpoint:
    """Checkpoint and what else rank 0 has read, the same on all ranks."""

    info: CheckpointInfo | None
    """None if there is no checkpoint."""
    state: State
    param_groups: list[dict[str, Any]]
    path: str
    warnings: list[str]
    record: Any


def find_on_rank_0(find: Callable[[], Found], comm: Comm) -> SentCheckpoint:
    """Return what `find` finds on rank 0, however long that takes; called on every rank. Raise on all if it fails."""
    sent = _send_from_rank_0(lambda: _found(find), comm)
    if "error" in sent:
        raise CheckpointError(sent["error"], hint=sent["hint"])
    info = None
    if sent["info"] is not None:
        kept = msgspec.convert(sent["info"], CheckpointInfo)
        info = msgspec.structs.replace(kept, loop=sent["loop"], extra=sent["extra"])
    return SentCheckpoint(
        info=info,
        state=State(*sent["state"]),
        param_groups=sent["param_groups"],
        path=sent["path"],
        warnings=sent["warnings"],
        record=sent["record"],
    )


def load_checkpoint(sync: Sync, checkpoint: SentCheckpoint, *, keeps_groups: bool) -> list[str]:
    """Load model, optimiser, strategy and random numbers; return what could not be used, in words.

    With `keeps_groups`, the settings of the optimiser are those of the checkpoint, too.
    """
    assert checkpoint.info is not None, "there is a checkpoint to load"
    info, state, lost = checkpoint.info, checkpoint.state, list[str]()
    kept, present = info.loop[OPTIMIZER], type(sync.optimizer).__qualname__
    if kept != present:
        state = State(state.model, {}, state.per_rank)
        lost = [f"the state of the optimiser, which was {kept} and is {present}"]
    elif keeps_groups:
        lost = load_param_groups(sync, checkpoint.param_groups)
    return lost + load_state(sync, state, info.random, ranks=info.ranks)


def _found(find: Callable[[], Found]) -> dict[str, Any]:
    """Return what was found, or the error, as a message to all ranks."""
    try:
        found = find()
    except PacelineError as error:
        return {"error": error.message, "hint": error.hint}
    loaded = found.loaded
    if loaded is None:
        none: dict[str, Any] = {"info": None, "state": [{}, {}, {}], "param_groups": [], "path": ""}
        return none | {"warnings": found.warnings, "record": found.record}
    info = msgspec.structs.replace(loaded.info, loop={}, extra=None)  # These may hold tensors.
    return {
        "info": msgspec.to_builtins(info),
        "loop": loaded.info.loop,
        "extra": loaded.info.extra,
        "state": [loaded.state.model, loaded.state.optimizer, loaded.state.per_rank],
        "param_groups": loaded.param_groups,
        "path": str(loaded.path),
        "warnings": found.warnings,
        "record": found.record,
    }


def _send_from_rank_0(make: Callable[[], Any], comm: Comm) -> Any:
    """Return the nested value of tensors and JSON values that rank 0 makes, on every rank."""
    group = comm.control.group

    def prepare() -> tuple[Any, NestedMessage]:
        value = make()
        return value, NestedMessage(value, "the checkpoint", KEPT_HINT)

    prepared = comm.control.while_others_wait(prepare)
    if prepared is None:
        return receive_broadcast(group)
    value, message = prepared
    message.broadcast(group)
    return value
