"""Tests of checkpoints that cannot be written, of the best one, and of a stop after them, on ranks of the pool."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from paceline.errors import CheckpointError, PreemptedError
from paceline.records import read_run
from paceline.records.events import CheckpointEvent
from paceline.training.checkpoints import resume
from paceline.training.checkpoints.storage import async_writer
from paceline.training.checkpoints.storage.contents import EncodedCheckpoint, Loaded
from paceline.training.checkpoints.storage.folder import CheckpointFolder
from ranks import Pool
from training.checkpoints.runs import train, trained

RUN = {
    "workload": "training.checkpoints.test_resume:small",
    "batch": 8,
    "steps": 15,
    "checkpoint_every": "5",
    "keep": 9,
}


def fails_at(step: int, error: Exception) -> Any:
    """Return a function in place of `CheckpointFolder._write_files`, which raises at one step."""
    write = CheckpointFolder._write_files

    def fail(self: CheckpointFolder, path: Path, encoded: EncodedCheckpoint) -> None:
        if encoded.info.step == step:
            raise error
        write(self, path, encoded)

    return patch.object(CheckpointFolder, "_write_files", fail)


@contextmanager
def unexpected() -> Iterator[None]:
    with fails_at(5, ValueError("no such thing")):
        yield


@contextmanager
def full_disk() -> Iterator[None]:
    with fails_at(5, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
        yield


@contextmanager
def without_memory() -> Iterator[None]:
    """Let the copy of the first state fail: nothing is written then."""
    copied, calls = async_writer._copied, []

    def fail_once(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            raise MemoryError("no memory")
        return copied(*arguments)

    with patch.object(async_writer, "_copied", fail_once):
        yield


UNEXPECTED = "the checkpoint of step 5 could not be written: ValueError: no such thing."


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize(
    ("disturbance", "message"), [(unexpected, UNEXPECTED), (full_disk, "No space left on device; older checkpoints")]
)
def test_a_run_goes_on_after_a_checkpoint_that_could_not_be_written(
    pool: Pool, tmp_path: Path, mode: str, disturbance: Any, message: str
) -> None:
    record = trained(pool, tmp_path, **RUN, checkpoint=mode, disturbed_by=disturbance)
    failed, *others = sorted(record.events_of(CheckpointEvent), key=lambda event: event.step)
    assert message in (failed.error or "")
    assert (failed.step, failed.write_s, failed.bytes) == (5, None, 0)
    assert [(event.step, event.error) for event in others] == [(10, None), (15, None)]
    assert CheckpointFolder(tmp_path / "checkpoints").steps() == [10, 15]


def test_a_run_goes_on_after_a_state_that_could_not_be_copied(pool: Pool, tmp_path: Path) -> None:
    record = trained(pool, tmp_path, **RUN, disturbed_by=without_memory)
    failed, *others = record.events_of(CheckpointEvent)
    assert failed.error == "the checkpoint of step 5 could not be written: MemoryError: no memory."
    assert [(event.step, event.error) for event in others] == [(10, None), (15, None)]


@pytest.mark.parametrize("disturbance", [unexpected, without_memory])
def test_a_run_that_should_stop_does_so_on_all_ranks(pool: Pool, tmp_path: Path, disturbance: Any) -> None:
    errors = train(pool, tmp_path, **RUN, on_checkpoint_error="stop", disturbed_by=disturbance)
    assert [type(error) for error in errors] == [CheckpointError] * 2
    assert {str(error) for error in errors} == {read_run(tmp_path).events_of(CheckpointEvent)[0].error}


def test_an_old_failure_does_not_spoil_a_stop(pool: Pool, tmp_path: Path) -> None:
    errors = train(pool, tmp_path, **RUN | {"steps": 1000}, stop_after=6, disturbed_by=unexpected)
    assert [type(error) for error in errors] == [PreemptedError] * 2, errors
    assert read_run(tmp_path).events_of(CheckpointEvent)[0].error == UNEXPECTED


@contextmanager
def never() -> Iterator[None]:
    """Let every checkpoint fail."""
    with patch.object(CheckpointFolder, "_write_files", side_effect=ValueError("no such thing")):
        yield


def test_a_stop_whose_checkpoint_could_not_be_written_fails(pool: Pool, tmp_path: Path) -> None:
    errors = train(pool, tmp_path, **RUN | {"steps": 1000}, stop_after=6, disturbed_by=never)
    assert [type(error) for error in errors] == [CheckpointError] * 2, errors


def test_the_last_evaluation_may_mark_the_best(pool: Pool, tmp_path: Path) -> None:
    """It follows the last checkpoint, since no evaluation is due at that step."""
    settings = RUN | {"evaluate": True, "eval_every": "10", "lr": 0.05, "steps": 15}
    record = trained(pool, tmp_path, **settings)
    assert record.summary is not None
    assert record.summary.best is not None
    assert record.summary.best.step == 15
    assert CheckpointFolder(tmp_path / "checkpoints").best() == 15


SHORT_S, SLOW_S = 2.0, 3.0
"""Time-out of ranks that wait for each other, and time for which a slow disk reads or writes."""


@contextmanager
def slow_disk() -> Iterator[None]:
    """Let the reading of each checkpoint, and the writing of that of step 5, take longer than the time-out."""
    write, read = CheckpointFolder._write_files, resume.load

    def write_slowly(self: CheckpointFolder, path: Path, encoded: EncodedCheckpoint) -> None:
        time.sleep(SLOW_S if encoded.info.step == 5 else 0)
        write(self, path, encoded)

    def read_slowly(path: Path) -> Loaded:
        time.sleep(SLOW_S)
        return read(path)

    with (
        patch.object(CheckpointFolder, "_write_files", write_slowly),
        patch.object(resume, "load", read_slowly),
    ):
        yield


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_disk_slower_than_the_time_out(pool: Pool, tmp_path: Path, mode: str) -> None:
    """Workers and a separate server wait: for each checkpoint that is written, or for all of them at the end."""
    settings = RUN | {"strategy": "parameter_server:extra=true", "timeout": SHORT_S, "steps": 6, "checkpoint": mode}
    trained(pool, tmp_path / "a", 3, **settings, disturbed_by=slow_disk)
    path = tmp_path / "a" / "checkpoints" / "step-00000005"
    if mode == "sync":
        trained(pool, tmp_path / "b", 3, **settings, resume=path, disturbed_by=slow_disk)
