"""Folder of an experiment that is being written, or continued."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from filelock import BaseFileLock

from paceline.errors import DivergenceError, RecordError
from paceline.records import schema
from paceline.records.decoder import exists
from paceline.records.events import (
    ContinuedEvent,
    ExperimentEvent,
    FailureEvent,
    ScheduledEvent,
    events_of,
)
from paceline.records.experiment.continuation import (
    already_finished,
    changed_code,
    check_same,
    continued_design,
    failures_of,
    is_finished,
    most_repeats,
    user_code_of,
)
from paceline.records.experiment.design import ExperimentDescription, is_experiment, read_description
from paceline.records.experiment.events import all_events_of, folder_of
from paceline.records.folder_lock import lock_folder
from paceline.records.reader import is_complete
from paceline.records.writer import write_json


@dataclass(frozen=True)
class EarlierParts:
    """Contents of an experiment that goes on, from before."""

    events: list[ExperimentEvent]
    kept: dict[str, ScheduledEvent]
    """Complete runs by folder. All others are measured again."""
    failed: list[str]
    """Candidates that failed; they are tried again."""
    diverged: list[FailureEvent]
    """Failures of candidates that diverged. They stay left out, since the same seed would diverge again."""
    reproved: set[str]
    """Candidates whose proof no longer holds, since their code has changed."""

    @property
    def parts(self) -> int:
        """Number of earlier commands that measured in this folder."""
        return 1 + len(events_of(self.events, ContinuedEvent))

    @property
    def repeats(self) -> int:
        """Number of repeats that have begun."""
        return max((event.repeat + 1 for event in self.kept.values()), default=0)

    @property
    def last_event_s(self) -> float:
        """Time of the last event."""
        return max((event.time_s for event in self.events), default=0.0)


@dataclass(frozen=True)
class ExperimentFolder:
    """Folder of an experiment that is being written. Only one process at a time may write it."""

    path: Path
    lock: BaseFileLock | None = field(default=None, compare=False)
    """Lock that this process holds; the kernel releases it when the process ends, even if it is killed."""
    earlier: EarlierParts | None = None
    """Contents from before, if the experiment goes on; None for a new one."""

    @classmethod
    def create(cls, path: Path, description: ExperimentDescription) -> ExperimentFolder:
        """Create the folder of an experiment, or open that of the same experiment to continue it.

        Raise `RecordError` if the folder contains any other record, if the experiment in it is finished, or if another
        process is writing it. The folder is then left as it is.
        """
        if (path / schema.RUN_FILE).exists():
            raise RecordError(
                f"{path} already contains a record.", hint="name another folder with --out, or remove this one"
            )
        code = user_code_of(description.candidates, description.config)
        description = msgspec.structs.replace(description, user_code=code)
        with ExitStack() as on_error:
            try:
                lock = lock_folder(path, "measuring")
                on_error.callback(lock.release)
                earlier, description = _continue(path, description) if is_experiment(path) else (None, description)
                write_json(path / schema.EXPERIMENT_FILE, description)
            except OSError as error:
                hint = "name another folder with --out"
                raise RecordError(f"cannot write to {path}: {error.strerror}.", hint=hint) from None
            on_error.pop_all()
        return cls(path, lock, earlier)

    def set_aside(self, folder: Path) -> None:
        """Move what an earlier command left in a folder out of the way, so that no record contains parts of two."""
        if self.earlier is None or not folder.is_dir() or not any(folder.iterdir()):
            return
        target = self.path / schema.INCOMPLETE_FOLDER.format(self.earlier.parts) / folder.relative_to(self.path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(target)
        except OSError as error:
            raise RecordError(f"cannot move {folder} to {target}: {error.strerror}.") from None

    def close(self) -> None:
        """Release the lock."""
        if self.lock is not None:
            self.lock.release()


def _continue(path: Path, new: ExperimentDescription) -> tuple[EarlierParts, ExperimentDescription]:
    """Return the contents of an unfinished experiment, and its description; raise if it is another or finished."""
    old = read_description(path / schema.EXPERIMENT_FILE)
    check_same(path, old, new)
    events = all_events_of(path, old)
    scheduled = {event.folder: event for event in events_of(events, ScheduledEvent)}
    kept = {folder: event for folder, event in scheduled.items() if is_complete(folder_of(event, path))}
    stopped = {event.candidate: folder for folder, event in kept.items() if not _is_finished_run(path / folder)}
    failures = failures_of(events)
    diverged = {name for name, event in failures.items() if event.kind == DivergenceError.__name__ and name in stopped}
    failed = [name for name in failures if name not in diverged]
    more_repeats = new.design.repeats > old.design.repeats or most_repeats(new.design) > most_repeats(old.design)
    if is_finished(events) and not more_repeats:
        raise already_finished(path, len(kept), failed, old.design)
    finished = {event.candidate for folder, event in kept.items() if _is_finished_run(path / folder)}
    reproved = changed_code(old, new, finished)
    diverged -= reproved  # With other code, a candidate may train.
    for name in stopped.keys() - diverged:
        del kept[stopped[name]]
    description = msgspec.structs.replace(
        old, design=continued_design(old.design, new.design), user_code=old.user_code | new.user_code
    )
    return EarlierParts(
        events=events,
        kept=kept,
        failed=[name for name in failures if name not in diverged],
        diverged=[event for name, event in failures.items() if name in diverged],
        reproved=reproved,
    ), description


def _is_finished_run(folder: Path) -> bool:
    return exists(folder / schema.FINISHED_FILE)
