"""The folder of a run's checkpoints: writes them so that a crash leaves the older ones intact, and finds the newest.

checkpoints/
    step-00001200/             one checkpoint; complete, since it is renamed when all its files are on the disk
    step-00001200-rewritten/   the same step written again; takes the place of the first when that is removed
    .writing-step-00001300/    unfinished; removed by the next writer
    .removing-step-00001000/   being removed; removed by the next writer
    best.json                  names the best one by validation, if any
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from paceline.errors import CheckpointError
from paceline.records.atomic_file import atomic_file
from paceline.records.checkpoint import (
    BEST_FILE,
    CHECKPOINT_FILE,
    BestCheckpoint,
    CheckpointIndex,
    CheckpointInfo,
)
from paceline.records.decoder import decode
from paceline.strategies.base.strategy import State
from paceline.training.checkpoints.storage.contents import EncodedCheckpoint, Loaded, ParamGroups
from paceline.training.checkpoints.storage.files import (
    DamagedError,
    check_sizes,
    describe_os_error,
    hint_for,
    read_content,
    sync_folder,
    write_content,
    write_tensors,
)
from paceline.training.checkpoints.storage.reading import read_checkpoint
from paceline.training.checkpoints.storage.tensors import on_disk

CHECKPOINT_NAME = re.compile(r"step-(\d{8,18})(-rewritten)?")
WRITING, REMOVING, REWRITTEN = ".writing-", ".removing-", "-rewritten"
UNFINISHED_NAME = re.compile(r"\.writing-step-(\d{8,18})")
ContentT = TypeVar("ContentT")


@dataclass(frozen=True)
class _Entry:
    """A checkpoint in the folder, by its name; its content may be damaged."""

    path: Path
    step: int
    sequence: int | None
    """None if `checkpoint.json` cannot be read, or a file of tensors is missing or has another size."""

    @property
    def age(self) -> tuple[bool, int, int]:
        """Key by which the oldest comes first; damaged ones count as the oldest."""
        return self.sequence is not None, self.sequence or 0, self.step


class CheckpointFolder:
    """Checkpoints of one run, of which the last `keep` and the best stay. One process at a time writes to it.

    `path` is the folder that contains the checkpoints themselves. It is created by the first write.
    """

    def __init__(self, path: Path, keep: int = 2) -> None:
        assert keep >= 1, "the checkpoint that was just written stays"
        self.path = path
        self._keep = keep
        self._lock = threading.Lock()

    def write(self, state: State, param_groups: ParamGroups, info: CheckpointInfo, *, is_best: bool = False) -> Path:
        """Write a checkpoint and remove those that are no longer needed; return its folder.

        Raise a CheckpointError if that fails, for example because the disk is full. The older ones are then intact.
        """
        encoded = EncodedCheckpoint.of(state, param_groups, info)
        tensors = {file: on_disk(named) for file, named in encoded.tensors.items()}
        return self.write_encoded(replace(encoded, tensors=tensors), is_best=is_best)

    def write_encoded(self, encoded: EncodedCheckpoint, *, is_best: bool = False) -> Path:
        """Write a checkpoint whose tensors are as on disk; see `write`."""
        step = encoded.info.step
        with self._lock, self._explaining(step):
            self._make()
            self._remove_leftovers()
            unfinished = self.path / f"{WRITING}{_name(step)}"
            try:
                self._write_files(unfinished, encoded)
                path = self._put_in_place(unfinished, step)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
            if is_best:
                self._write_best(step)
            elif self._best() == step:  # Another checkpoint of this step, which is replaced, was the best.
                (self.path / BEST_FILE).unlink()
            self._prune()
            return path

    def mark_best(self, step: int) -> None:
        """Make an existing checkpoint the best. The next write removes the one that was, unless it is a recent one."""
        with self._lock, self._explaining(step):
            if not any(entry.step == step for entry in self._entries()):
                raise CheckpointError(f"{self.path} has no checkpoint of step {step} to mark as the best.")
            self._write_best(step)

    def reset_best(self, step: int | None) -> None:
        """Make the checkpoint of a step the best one, or none if there is no such checkpoint."""
        with self._lock, self._explaining(step or 0):
            if step is not None and any(entry.step == step for entry in self._entries()):
                self._write_best(step)
            else:
                (self.path / BEST_FILE).unlink(missing_ok=True)

    def best(self) -> int | None:
        """Return the step of the best checkpoint by validation; None if none is marked."""
        with self._lock:
            return self._best()

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints in ascending order, also of damaged ones."""
        with self._lock:
            return sorted({entry.step for entry in self._entries()})

    def newest(self) -> tuple[Loaded | None, list[str]]:
        """Read the newest valid checkpoint; return it with a sentence for each newer one that is damaged.

        The newest is the one that was written last, which has a smaller step than others if the run was resumed from
        an older one.
        """
        return self.newest_by(read_checkpoint)

    def newest_by(self, read: Callable[[Path], ContentT]) -> tuple[ContentT | None, list[str]]:
        """Read the newest valid checkpoint by a function that raises DamagedError; see `newest`."""
        with self._lock:
            damaged: list[tuple[_Entry, str]] = []
            entries = sorted(self._entries(), key=lambda entry: entry.age, reverse=True)
            for entry in sorted(entries, key=lambda entry: entry.sequence is not None):  # First those without a place.
                try:
                    content = read(entry.path)
                except DamagedError as error:
                    damaged.append((entry, f"{entry.path} is not usable: {error}."))
                    continue
                newer = [text for other, text in damaged if other.sequence is not None or other.step >= entry.step]
                return content, newer + self._unfinished(after=entry.step)
            return None, [text for _, text in damaged] + self._unfinished(after=-1)

    def _entries(self) -> list[_Entry]:
        found = ((path, CHECKPOINT_NAME.fullmatch(path.name)) for path in self._content())
        return [_Entry(path, int(match[1]), _sequence(path)) for path, match in found if match]

    def _content(self) -> list[Path]:
        """Return what is in the folder, by name; raise a CheckpointError if the folder cannot be read."""
        try:
            return sorted(self.path.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"the folder of checkpoints {self.path} cannot be read: {describe_os_error(error)}.",
                hint="make it a folder that you can read, or name another one",
            ) from None

    def _unfinished(self, after: int) -> list[str]:
        """Return a sentence for each checkpoint after a step whose writing was cut off."""
        matches = [UNFINISHED_NAME.fullmatch(path.name) for path in self._content()]
        return [
            f"the checkpoint of step {step} in {self.path} is incomplete: its writer was stopped."
            for step in [int(match[1]) for match in matches if match]
            if step > after
        ]

    @contextmanager
    def _explaining(self, step: int) -> Iterator[None]:
        """Turn an error of the system into a CheckpointError."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.path}: {describe_os_error(error)}; older "
                "checkpoints are intact.",
                hint=hint_for(error),
            ) from None

    def _make(self) -> None:
        if not self.path.is_dir():
            self.path.mkdir(parents=True, exist_ok=True)
            sync_folder(self.path.parent)

    def _write_files(self, folder: Path, encoded: EncodedCheckpoint) -> None:
        folder.mkdir()
        files = {name: write_tensors(folder / name, tensors) for name, tensors in encoded.tensors.items() if tensors}
        sequence = 1 + max((entry.sequence or 0 for entry in self._entries()), default=0)
        write_content(folder / CHECKPOINT_FILE, encoded.content(sequence, files))
        sync_folder(folder)

    def _put_in_place(self, unfinished: Path, step: int) -> Path:
        """Give a complete checkpoint its name, and return its path. At every moment, this step has a complete one."""
        path = self.path / _name(step)
        if not path.exists() and not path.is_symlink():
            unfinished.rename(path)
            sync_folder(self.path)
            return path
        rewritten = self.path / f"{_name(step)}{REWRITTEN}"
        self._remove(rewritten)
        unfinished.rename(rewritten)
        sync_folder(self.path)
        self._remove(path)
        rewritten.rename(path)
        sync_folder(self.path)
        return path

    def _prune(self) -> None:
        """Remove checkpoints other than the last ones and the best; called when a valid one has been written."""
        best = self._best()
        entries = sorted(self._entries(), key=lambda entry: entry.age)
        for entry in entries[: -self._keep]:
            if entry.step != best:
                with suppress(OSError):  # The next write tries again.
                    self._remove(entry.path)

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint: first its name, so that no reader finds a half of it."""
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            removing = path.with_name(f"{REMOVING}{path.name}")
            shutil.rmtree(removing, ignore_errors=True)
            path.rename(removing)
            shutil.rmtree(removing, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        """Remove what a writer that was killed has left."""
        for path in self._content():
            if path.name.startswith((WRITING, REMOVING)):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.endswith(REWRITTEN) and CHECKPOINT_NAME.fullmatch(path.name) and _sequence(path) is not None:
                original = path.with_name(path.name.removesuffix(REWRITTEN))
                self._remove(original)
                path.rename(original)

    def _best(self) -> int | None:
        try:
            return decode((self.path / BEST_FILE).read_bytes(), BestCheckpoint, "best").step
        except (OSError, ValueError):
            return None

    def _write_best(self, step: int) -> None:
        with atomic_file(self.path / BEST_FILE) as file:
            file.write_bytes(msgspec.json.encode(BestCheckpoint(step)) + b"\n")


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _sequence(path: Path) -> int | None:
    """Return the place of a checkpoint in the order of writing; None if it is damaged."""
    try:
        index = read_content(path, CheckpointIndex)
        check_sizes(path, index.files)
    except DamagedError:
        return None
    return index.sequence
