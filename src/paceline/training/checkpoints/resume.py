"""Resume of a run: rank 0 reads a checkpoint, and all ranks continue from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.comm import Comm
from paceline.errors import CheckpointError
from paceline.records import RunFolder
from paceline.records.checkpoint import CheckpointInfo
from paceline.records.events import ResumedEvent
from paceline.records.resumed import read_history, set_attempt_aside
from paceline.records.schema import CHECKPOINTS_FOLDER
from paceline.training.checkpoints.checkpointer import LoopState
from paceline.training.checkpoints.from_rank_0 import Found, SentCheckpoint, find_on_rank_0, load_checkpoint
from paceline.training.checkpoints.storage.folder import CheckpointFolder
from paceline.training.checkpoints.storage.load import load
from paceline.training.recording.history import RecordedWindows, Resumed, TrainedTotals
from paceline.training.sync import Sync
from paceline.workloads.position import Position


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Checkpoint and record that a run continues from, the same on all ranks."""

    checkpoint: SentCheckpoint
    """It has no info if a run is restarted that has written no checkpoint: the run begins again."""
    loop: LoopState | None
    """None if the run begins again."""
    recorded: RecordedWindows
    is_restart: bool

    @property
    def info(self) -> CheckpointInfo | None:
        """Description of the checkpoint; None if the run begins again."""
        return self.checkpoint.info

    @property
    def position(self) -> Position:
        """Position in the training data."""
        if self.info is None or self.loop is None:
            return Position()
        return Position(
            step=self.info.step,
            epoch=self.info.epoch,
            epoch_samples=self.info.epoch_samples,
            epoch_batches=self.info.epoch_batches,
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
            checkpoint=self.checkpoint.path,
            ranks_before=0 if info is None else info.ranks,
            strategy_before="" if info is None else info.strategy,
            lost=lost,
            warnings=self.checkpoint.warnings,
            is_restart=self.is_restart,
        )


def find_resume_point(path: Path, folder: RunFolder, comm: Comm) -> ResumePoint:
    """Read the checkpoint at `path` on rank 0, and continue the record in `folder`; called on every rank.

    Raise on all ranks if there is no valid checkpoint. A run that is restarted goes on from its own folder; without a
    checkpoint there, it begins again.
    """
    is_restart = path == folder.path
    sent = find_on_rank_0(lambda: _find(path, folder, is_restart=is_restart), comm)
    return ResumePoint(
        checkpoint=sent,
        loop=None if sent.info is None else LoopState.of(sent.info.loop),
        recorded=msgspec.convert(sent.record, RecordedWindows),
        is_restart=is_restart,
    )


def _find(path: Path, folder: RunFolder, *, is_restart: bool) -> Found:
    """Return the checkpoint and the windows of the record; set the files of the attempt before aside."""
    if is_restart:
        loaded, warnings = CheckpointFolder(path / CHECKPOINTS_FOLDER).newest()
    else:
        loaded = load(path)
        warnings = list(loaded.warnings)
    try:
        history = read_history(folder.path, 0 if loaded is None else loaded.info.step)
        set_attempt_aside(folder.path, history.attempt)
    except OSError as error:
        raise CheckpointError(f"the record in {folder.path} cannot be continued: {error}.") from None
    return Found(loaded, warnings, msgspec.to_builtins(RecordedWindows.of(history)))


def load_into(sync: Sync, point: ResumePoint, *, keeps_groups: bool) -> list[str]:
    """Load model, optimiser, strategy and random numbers; return what could not be used, in words.

    With `keeps_groups`, the settings of the optimiser are those of the checkpoint too, not those of the recipe.
    """
    if point.loop is None:
        return []
    sync.skipped_steps = point.loop.skipped_steps
    return load_checkpoint(sync, point.checkpoint, keeps_groups=keeps_groups)
