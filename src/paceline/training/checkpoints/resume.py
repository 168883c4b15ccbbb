"""Resume of a run: rank 0 reads a checkpoint, and all ranks continue from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.comm import Comm
from paceline.errors import CheckpointError, PacelineError
from paceline.records import RunFolder
from paceline.records.checkpoint import CheckpointInfo
from paceline.records.events import ResumedEvent
from paceline.records.resumed import read_history, set_attempt_aside
from paceline.records.schema import CHECKPOINTS_FOLDER
from paceline.strategies.base.strategy import State
from paceline.training.checkpoints.capture import load_param_groups, load_state, send_from_rank_0
from paceline.training.checkpoints.checkpointer import LoopState
from paceline.training.checkpoints.storage.folder import CheckpointFolder
from paceline.training.checkpoints.storage.load import load
from paceline.training.recording.history import RecordedWindows, Resumed, TrainedTotals
from paceline.training.sync import Sync
from paceline.workloads.position import Position


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Checkpoint and record that a run continues from, the same on all ranks."""

    info: CheckpointInfo | None
    """None if a run is restarted that has written no checkpoint: it begins again."""
    loop: LoopState | None
    state: State
    param_groups: list[dict[str, Any]]
    path: str
    recorded: RecordedWindows
    warnings: list[str]
    """A sentence for each newer checkpoint that is damaged."""
    is_restart: bool

    @property
    def position(self) -> Position:
        """Position in the training data."""
        if self.info is None or self.loop is None:
            return Position()
        return Position(
            step=self.info.step,
            epoch=self.info.epoch,
            epoch_samples=self.info.epoch_samples,
            epoch_ends=tuple(self.loop.epoch_ends),
        )

    @property
    def resumed(self) -> Resumed:
        """State of the run's windows."""
        position = self.position
        return Resumed(
            step=position.step,
            epoch=position.epoch,
            epoch_ends=position.epoch_ends,
            totals=TrainedTotals() if self.loop is None else self.loop.totals,
            recorded=self.recorded,
        )

    def event(self, lost: list[str]) -> ResumedEvent:
        """Return the event for the record; `lost` describes what could not be used."""
        info = self.info
        return ResumedEvent(
            step=self.position.step,
            redone=self.recorded.redone,
            checkpoint=self.path,
            ranks_before=0 if info is None else info.ranks,
            strategy_before="" if info is None else info.strategy,
            lost=lost,
            warnings=self.warnings,
            is_restart=self.is_restart,
        )


def find_resume_point(path: Path, folder: RunFolder, comm: Comm) -> ResumePoint:
    """Read the checkpoint at `path` on rank 0, and continue the record in `folder`; called on every rank.

    Raise on all ranks if there is no valid checkpoint. A run that is restarted goes on from its own folder; without a
    checkpoint there, it begins again.
    """
    is_restart = path == folder.path
    sent = send_from_rank_0(_read(path, folder, is_restart=is_restart) if comm.rank == 0 else None, comm)
    if "error" in sent:
        raise CheckpointError(sent["error"], hint=sent["hint"])
    info = None if sent["info"] is None else msgspec.convert(sent["info"], CheckpointInfo)
    return ResumePoint(
        info=info,
        loop=None if info is None else LoopState.of(sent["loop"]),
        state=State(*sent["state"]),
        param_groups=sent["param_groups"],
        path=sent["path"],
        recorded=msgspec.convert(sent["recorded"], RecordedWindows),
        warnings=sent["warnings"],
        is_restart=is_restart,
    )


def _read(path: Path, folder: RunFolder, *, is_restart: bool) -> dict[str, Any]:
    """Return the checkpoint and the history of the record, or the error, as a message to all ranks."""
    try:
        if is_restart:
            loaded, warnings = CheckpointFolder(path / CHECKPOINTS_FOLDER).newest()
        else:
            loaded = load(path)
            warnings = list(loaded.warnings)
        step = 0 if loaded is None else loaded.info.step
        history = read_history(folder.path, step)
        recorded = RecordedWindows.of(history)
        set_attempt_aside(folder.path, history.attempt)
    except PacelineError as error:
        return {"error": error.message, "hint": error.hint}
    except OSError as error:
        return {"error": f"the record in {folder.path} cannot be continued: {error}.", "hint": None}
    state = State({}, {}) if loaded is None else loaded.state
    return {
        "info": None
        if loaded is None
        else msgspec.to_builtins(msgspec.structs.replace(loaded.info, loop={}, extra=None)),
        "loop": None if loaded is None else loaded.info.loop,
        "state": [state.model, state.optimizer, state.per_rank],
        "param_groups": [] if loaded is None else loaded.param_groups,
        "path": "" if loaded is None else str(loaded.path),
        "recorded": msgspec.to_builtins(recorded),
        "warnings": warnings,
    }


def load_into(sync: Sync, point: ResumePoint, *, keeps_groups: bool) -> list[str]:
    """Load model, optimiser, strategy and random numbers; return what could not be used, in words.

    With `keeps_groups`, the settings of the optimiser are those of the checkpoint too, not those of the recipe.
    """
    if point.info is None or point.loop is None:
        return []
    state, lost, present = point.state, [], type(sync.optimizer).__qualname__
    if point.loop.optimizer != present:
        state = State(state.model, {}, state.per_rank)
        lost = [f"the state of the optimiser, which was {point.loop.optimizer} and is {present}"]
    elif keeps_groups:
        lost = load_param_groups(sync, point.param_groups)
    lost += load_state(sync, state, point.info.random, ranks=point.info.ranks)
    sync.skipped_steps = point.loop.skipped_steps
    return lost
