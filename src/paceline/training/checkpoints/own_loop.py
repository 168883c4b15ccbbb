"""Checkpoints in a user's own training loop: `sync.save` and `sync.restore`."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import msgspec

from paceline.comm.json_messages import gather_typed
from paceline.errors import CheckpointError, PacelineError, UsageError
from paceline.records.checkpoint import CheckpointInfo
from paceline.records.provenance import version_of
from paceline.strategies.base.strategy import State
from paceline.training.checkpoints.capture import capture, load_param_groups, load_state, send_from_rank_0
from paceline.training.checkpoints.storage.folder import CheckpointFolder
from paceline.training.sync import Restored, Sync

OPTIMIZER, SCHEDULER, SCALER = "optimizer", "scheduler", "scaler"
"""Parts of what a checkpoint keeps of the loop: the class of the optimiser, and two states."""


def save(sync: Sync, folder: Path, *, scheduler: Any, scaler: Any, extra: Any, keep: int) -> None:
    """Write a checkpoint on rank 0; called on every rank. Raise on all ranks if that fails."""
    if keep < 1:
        raise UsageError(f"sync.save() got keep={keep}.", hint="keep one checkpoint or more")
    loop = {
        OPTIMIZER: type(sync.optimizer).__qualname__,
        SCHEDULER: _state_of(scheduler, "scheduler"),
        SCALER: _state_of(scaler, "scaler"),
    }
    # Under some strategies and BatchNorm modes the statistics of ranks differ; keeping all of them is always right.
    captured = capture(sync, keeps_own_buffers=sync.ranks > 1 and not sync.uses_sync_batchnorm)
    problem = ["", ""]
    if sync.rank == 0:
        info = CheckpointInfo(
            step=sync.steps,
            epoch=0,
            epoch_samples=0,
            samples=0,
            strategy=sync.strategy.name,
            ranks=sync.ranks,
            config={},
            loop=loop,
            extra=extra,
            random=captured.random,
            time=time.time(),
            versions={name: version_of(name) or "" for name in ("paceline", "torch")},
        )
        try:
            CheckpointFolder(folder, keep).write(captured.state, captured.param_groups, info)
        except CheckpointError as error:
            problem = [error.message, error.hint or ""]
    message, hint = gather_typed(problem, list[str], sync.comm.control)[0]
    if message:
        raise CheckpointError(message, hint=hint or None)


def restore(sync: Sync, folder: Path, *, scheduler: Any, scaler: Any) -> Restored:
    """Continue from the newest valid checkpoint of a folder, which rank 0 reads; called on every rank."""
    sent = send_from_rank_0(_read(folder) if sync.rank == 0 else None, sync.comm)
    if "error" in sent:
        raise CheckpointError(sent["error"], hint=sent["hint"])
    if sync.rank == 0:
        for text in sent["warnings"]:
            warnings.warn(text, stacklevel=3)
    if sent["info"] is None:
        return Restored(0)
    info, loop = msgspec.convert(sent["info"], CheckpointInfo), sent["loop"]
    state, lost, present = State(*sent["state"]), [], type(sync.optimizer).__qualname__
    if loop[OPTIMIZER] != present:
        state = State(state.model, {}, state.per_rank)
        lost = [f"the state of the optimiser, which was {loop[OPTIMIZER]} and is {present}"]
    else:
        lost = load_param_groups(sync, sent["param_groups"])
    lost += load_state(sync, state, info.random, ranks=info.ranks)
    for part, kept, name in ((scheduler, loop[SCHEDULER], "scheduler"), (scaler, loop[SCALER], "scaler")):
        if part is not None and kept is not None:
            part.load_state_dict(kept)
        elif kept is not None:
            lost.append(f"the state of the {name}, because sync.restore() got none")
    if sync.rank == 0:
        for text in lost:
            warnings.warn(f"not restored from {sent['path']}: {text}.", stacklevel=3)
    sync.steps = info.step
    return Restored(info.step, sent["extra"])


def _read(folder: Path) -> dict[str, Any]:
    """Return the newest valid checkpoint, or the error, as a message to all ranks."""
    try:
        loaded, damaged = CheckpointFolder(folder).newest()
    except PacelineError as error:
        return {"error": error.message, "hint": error.hint}
    if loaded is None and damaged:
        return {
            "error": f"{folder} has no checkpoint that can be loaded. {' '.join(damaged)}",
            "hint": "restore the folder from a copy, or remove it to start from the beginning",
        }
    if loaded is None:
        return {"info": None, "warnings": []}
    info = msgspec.structs.replace(loaded.info, loop={}, extra=None)
    return {
        "info": msgspec.to_builtins(info),
        "loop": loaded.info.loop,
        "extra": loaded.info.extra,
        "state": [loaded.state.model, loaded.state.optimizer, loaded.state.per_rank],
        "param_groups": loaded.param_groups,
        "path": str(loaded.path),
        "warnings": damaged,
    }


def _state_of(part: Any, name: str) -> Any:
    """Return the state of a scheduler or a scaler; None for none."""
    if part is None:
        return None
    if not hasattr(part, "state_dict"):
        raise UsageError(
            f"sync.save() got an object of type {type(part).__name__} as {name}.",
            hint="pass an object with state_dict(), or put the value into extra",
        )
    return part.state_dict()
