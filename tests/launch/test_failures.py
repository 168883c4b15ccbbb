"""Root cause of a failed job: the choice among several failures."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import DataError, RankError, RecordError
from paceline.launch.failures import find_root_cause, record_failure
from paceline.records import RunFolder


def write_failure(folder: RunFolder, rank: int, error: BaseException, time_ns: int) -> None:
    """Write the error file of a rank that failed at a given time."""
    try:
        raise error
    except BaseException as raised:
        record_failure(raised, rank, folder.error_file(rank))
    content: dict[str, Any] = json.loads(folder.error_file(rank).read_text())
    folder.error_file(rank).write_text(json.dumps(content | {"time_ns": time_ns}))


def test_the_first_failure_is_the_root_cause(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    write_failure(folder, 0, ValueError("second"), 2)
    write_failure(folder, 1, KeyError("first"), 1)
    error = find_root_cause({0: 1, 1: 1}, folder, range(2))
    assert isinstance(error, RankError)
    assert error.message == "rank 1 failed: KeyError: 'first'"
    assert error.detail is not None
    assert "raise error" in error.detail
    assert str(folder.log_file(1)) in (error.hint or "")


def test_the_loss_of_a_peer_is_not_the_root_cause(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    write_failure(folder, 0, RuntimeError("[pair.cc] Connection closed by peer [127.0.0.1]:1"), 1)
    write_failure(folder, 1, ValueError("the cause"), 2)
    assert find_root_cause({0: 1, 1: 1}, folder, range(2)).message == "rank 1 failed: ValueError: the cause"


def test_the_loss_of_a_peer_is_shown_if_there_is_no_other_failure(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    write_failure(folder, 0, RuntimeError("[pair.cc] Connection closed by peer [198.18.0.2]:1"), 1)
    error = find_root_cause({0: 1}, folder, range(1))
    assert "rank 0 lost the connection to another rank" in error.message
    assert str(folder.log_file(0)) in (error.hint or "")


def test_a_rank_killed_by_a_signal_is_the_root_cause(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    write_failure(folder, 0, ValueError("late"), 1)
    codes = {0: 1, 2: -signal.SIGSEGV, 3: -signal.SIGTERM}
    assert find_root_cause(codes, folder, range(4)).message == "rank 2 was killed by SIGSEGV."


def test_a_known_error_keeps_its_kind_and_hint(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    write_failure(folder, 1, DataError("a.bin is truncated.", hint="delete it"), 1)
    error = find_root_cause({1: 1}, folder, range(2))
    assert type(error) is DataError
    assert (error.message, error.hint, error.detail) == ("a.bin is truncated.", "delete it", None)


def test_a_rank_without_an_error_file(tmp_path: Path) -> None:
    error = find_root_cause({3: 9}, RunFolder.create(tmp_path), range(4))
    assert error.message == "rank 3 ended with exit code 9."


def test_a_rank_that_did_not_respond_is_named_with_its_stack(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    write_failure(folder, 0, RuntimeError("[buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"), 1)
    stack = 'Stack (most recent call first):\n  File "own.py", line 3 in loss'
    folder.log_file(1).write_text(f"noise\n{stack}\n")
    error = find_root_cause({0: 1}, folder, range(2))
    assert error.message.startswith("rank 0 stopped waiting for other ranks (Timed out waiting 4000ms")
    assert error.message.endswith("rank 1 did not respond.")
    assert error.detail == stack


def test_a_damaged_error_file_is_named(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    write_failure(folder, 1, ValueError("the cause"), "late")  # type: ignore[arg-type]
    with pytest.raises(RecordError, match=r"rank-1.json is damaged: error.time_ns is text, not a whole number"):
        find_root_cause({1: 1}, folder, range(2))


def test_the_hint_of_an_unknown_error_is_not_used(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    error = ValueError("the cause")
    error.hint = {"a": 1}  # type: ignore[attr-defined]
    write_failure(folder, 0, error, 1)
    assert find_root_cause({0: 1}, folder, range(1)).message == "rank 0 failed: ValueError: the cause"
