"""Checkpoints in a user's own training loop: `sync.save` and `sync.restore`."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

from paceline.comm.messages.json_messages import gather_typed
from paceline.errors import CheckpointError, UsageError
from paceline.records.checkpoint import CheckpointInfo
from paceline.records.provenance import version_of
from paceline.training.checkpoints.capture import Captured, capture
from paceline.training.checkpoints.from_rank_0 import OPTIMIZER, Found, find_on_rank_0, load_checkpoint
from paceline.training.checkpoints.storage.folder import CheckpointFolder
from paceline.training.checkpoints.storage.load import DAMAGED_HINT
from paceline.training.sync import Restored, Sync

SCHEDULER, SCALER = "scheduler", "scaler"
"""Keys of two states in what a checkpoint keeps of the loop."""
NO_PROBLEM = ["", ""]
"""Message and hint of no error."""


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
    problem = sync.comm.control.while_others_wait(lambda: _write(sync, captured, folder, loop, extra, keep))
    message, hint = gather_typed(problem or NO_PROBLEM, list[str], sync.comm.control)[0]
    if message:
        raise CheckpointError(message, hint=hint or None)


def _write(sync: Sync, captured: Captured, folder: Path, loop: dict[str, Any], extra: Any, keep: int) -> list[str]:
    """Write a checkpoint on rank 0; return the message and the hint of an error, both empty if there is none."""
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
        return [error.message, error.hint or ""]
    return NO_PROBLEM


def restore(sync: Sync, folder: Path, *, scheduler: Any, scaler: Any) -> Restored:
    """Continue from the newest valid checkpoint of a folder, which rank 0 reads; called on every rank."""
    sent = find_on_rank_0(lambda: _find(folder), sync.comm)
    if sync.rank == 0:
        for text in sent.warnings:
            warnings.warn(text, stacklevel=3)
    if sent.info is None:
        return Restored(0)
    lost = load_checkpoint(sync, sent, keeps_groups=True)
    for part, name in ((scheduler, SCHEDULER), (scaler, SCALER)):
        kept = sent.info.loop[name]
        if part is not None and kept is not None:
            part.load_state_dict(kept)
        elif kept is not None:
            lost.append(f"the state of the {name}, because sync.restore() got none")
    if sync.rank == 0:
        for text in lost:
            warnings.warn(f"not restored from {sent.path}: {text}.", stacklevel=3)
    sync.steps = sent.info.step
    return Restored(sent.info.step, sent.info.extra)


def _find(folder: Path) -> Found:
    """Return the newest valid checkpoint; raise if all are damaged."""
    loaded, damaged = CheckpointFolder(folder).newest()
    if loaded is None and damaged:
        raise CheckpointError(
            f"{folder} has no checkpoint that can be loaded. {' '.join(damaged)}",
            hint=DAMAGED_HINT,
        )
    return Found(loaded, damaged)


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
