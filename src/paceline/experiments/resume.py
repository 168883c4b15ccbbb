"""Resume of a run from a checkpoint: the checkpoint to go on from, the folder of the record, and the settings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from paceline.config import RunConfig
from paceline.config.setting import metadata_of, option_name
from paceline.errors import CheckpointError, UsageError
from paceline.formatting import plural
from paceline.launch.launcher_process import Notify
from paceline.records.checkpoint import CheckpointInfo
from paceline.records.schema import CHECKPOINTS_FOLDER, FINISHED_FILE, RUN_FILE
from paceline.workloads.names import is_user_workload

LATEST, AUTO = "latest", "auto"
RUNS_FOLDER = Path("runs")


@dataclass(frozen=True)
class ResumedRun:
    """A run that goes on from a checkpoint."""

    config: RunConfig
    path: Path
    """Checkpoint, or the folder whose newest valid one it goes on from."""
    out: Path
    """Folder of the record."""
    ranks: int | None
    """World size of the run that wrote the checkpoint; None if there is none."""
    is_over: bool = False
    """Whether the run has finished, so that there is nothing to train."""


def prepare_resume(
    config: RunConfig, resume: str, out: Path | None, given: Collection[str], notify: Notify
) -> ResumedRun | None:
    """Return the run that `--resume` names; `given` are the settings that the user gives, which override its own.

    Lists the settings that differ. Return None if the run begins, as it may with `auto`.
    """
    from paceline.training.checkpoints.storage.load import read_info

    if resume == AUTO:
        out = _require_out(out)
        if not any((out / CHECKPOINTS_FOLDER).glob("step-*")):
            return ResumedRun(config, out, out, None) if (out / RUN_FILE).exists() else None
    path = _checkpoints_of(_find(LATEST if resume == AUTO else resume, out))
    info = read_info(path)
    saved = _known_settings(info)
    merged = _merge(saved, {name: getattr(config, name) for name in given if name in saved})
    _check_model(saved, merged)
    run = run_folder_of(path)
    folder = out or run or path.parent
    if run is None or folder.resolve() != run.resolve():
        if "save" not in given:  # The file belongs to the first run.
            merged = replace(merged, save="")
    elif (run / FINISHED_FILE).exists() and _is_at_end(info, merged):
        notify(f"{run} has trained all of its {plural(info.step, 'step')}; give more --epochs or --steps to go on")
        return ResumedRun(merged, path, folder, None, is_over=True)
    for line in _differences(saved, asdict(merged)):
        notify(line)
    ranks = int(info.loop.get("world_size", info.ranks))
    return ResumedRun(merged, path, folder, ranks)


def _check_model(saved: dict[str, Any], config: RunConfig) -> None:
    """Raise if the checkpoint is of another built-in model; the model of a user's workload is known to ranks only."""
    now = config.workload
    before = saved.get("workload", now)
    if before != now and not any(map(is_user_workload, (before, now))):
        raise CheckpointError(
            f"the checkpoint is of another model: {before}, not {now}.",
            hint=f"leave {now} out, or train it in another folder without --resume",
        )


def _is_at_end(info: CheckpointInfo, config: RunConfig) -> bool:
    """Return whether a run of this length ends at a checkpoint, or before it."""
    if config.steps is not None:
        return info.step >= config.steps
    return config.seconds is None and info.epoch >= config.most_epochs


def _merge(saved: dict[str, Any], given: dict[str, Any]) -> RunConfig:
    """Return the settings of the checkpoint, overridden by the given ones.

    A given length, in steps, epochs or seconds, replaces that of the checkpoint, and so does a given batch.
    """
    metadata, kept = metadata_of(RunConfig), dict(saved)
    replaced = {name for name, setting in metadata.items() if setting.ends_run} if _sets_length(given) else set()
    for name, setting in metadata.items():
        if setting.in_place_of in given:
            replaced.add(name)
        if name in given and setting.in_place_of:
            replaced.add(setting.in_place_of)
    for name in replaced & kept.keys():
        kept[name] = getattr(RunConfig(), name)
    return RunConfig(**(kept | given))


def _sets_length(given: Collection[str]) -> bool:
    return any(setting.ends_run and name in given for name, setting in metadata_of(RunConfig).items())


def _require_out(out: Path | None) -> Path:
    if out is None:
        raise UsageError(
            "--resume auto was given without --out.", hint="name the folder in which the run begins or goes on"
        )
    return out


def _find(resume: str, out: Path | None) -> Path:
    """Return the checkpoint, or the folder of checkpoints, that the value of `--resume` names."""
    if resume != LATEST:
        return Path(resume)
    if out is not None:
        if not (out / CHECKPOINTS_FOLDER).is_dir():
            raise CheckpointError(
                f"{out} has no checkpoints to resume from.",
                hint="name the folder of a run that was trained with --checkpoint-every, or a checkpoint: "
                "--resume PATH",
            )
        return out
    runs = [folder.parent for folder in RUNS_FOLDER.glob(f"*/{CHECKPOINTS_FOLDER}") if any(folder.glob("step-*"))]
    if not runs:
        raise CheckpointError(
            f"no run under {RUNS_FOLDER}/ has a checkpoint to resume from.",
            hint="train with --checkpoint-every, or name a checkpoint: --resume PATH",
        )
    return max(runs, key=lambda run: (run / CHECKPOINTS_FOLDER).stat().st_mtime)


def _checkpoints_of(path: Path) -> Path:
    """Return the folder of checkpoints in a run's folder, or the path as it is if there is none.

    By the path of its own folder, a run that the launcher restarts begins again if no checkpoint is valid.
    """
    inner = path / CHECKPOINTS_FOLDER
    return inner if inner.is_dir() else path


def run_folder_of(path: Path) -> Path | None:
    """Return the folder of the run that a checkpoint, or a folder of them, belongs to; None if it is in no run.

    It is the one with the folder `checkpoints`: a resume that was killed may have left no other file there.
    """
    return next((place.parent for place in (path, path.parent) if place.name == CHECKPOINTS_FOLDER), None)


def _known_settings(info: CheckpointInfo) -> dict[str, Any]:
    """Return the settings of the run that wrote a checkpoint, as far as this version has them."""
    if not info.config:
        raise UsageError(
            "the checkpoint was written by sync.save() in a training loop of your own, so it has no settings to train "
            "by.",
            hint="restore it there with sync.restore()",
        )
    names = {own.name for own in fields(RunConfig)}
    saved = {name: value for name, value in info.config.items() if name in names}
    if saved.get("batch_per_rank"):  # The number of ranks may be another, but the global batch stays.
        saved |= {"batch": saved["batch_per_rank"] * info.ranks, "batch_per_rank": None}
    return saved


def _differences(saved: dict[str, Any], merged: dict[str, Any]) -> list[str]:
    """Return a line for each setting with another value than in the checkpoint."""
    changed = [name for name in metadata_of(RunConfig) if name in saved and saved[name] != merged[name]]
    if not changed:
        return []
    lines = [f"resuming with {plural(len(changed), 'setting')} other than in the checkpoint:"]
    return lines + [f"  {option_name(RunConfig, name)}: {merged[name]} (was {saved[name]})" for name in changed]
