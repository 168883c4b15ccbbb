"""Which of several failures is shown."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from paceline.errors import DataError, RankError
from paceline.launch.failures import explain, record_failure
from paceline.records import RunFolder


def failed(folder: RunFolder, rank: int, error: BaseException, time_ns: int) -> None:
    """As a rank that fails writes it down, at a given time."""
    try:
        raise error
    except BaseException as raised:
        record_failure(raised, rank, folder.error_file(rank))
    content: dict[str, Any] = json.loads(folder.error_file(rank).read_text())
    folder.error_file(rank).write_text(json.dumps(content | {"time_ns": time_ns}))


def test_the_first_is_shown(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    failed(folder, 0, ValueError("second"), 2)
    failed(folder, 1, KeyError("first"), 1)
    error = explain({0: 1, 1: 1}, folder, range(2))
    assert isinstance(error, RankError)
    assert error.message == "rank 1 failed: KeyError: 'first'"
    assert error.detail is not None
    assert "raise error" in error.detail
    assert str(folder.log_file(1)) in (error.hint or "")


def test_the_loss_of_a_peer_is_not_the_cause(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    failed(folder, 0, RuntimeError("[pair.cc] Connection closed by peer [127.0.0.1]:1"), 1)
    failed(folder, 1, ValueError("the cause"), 2)
    assert explain({0: 1, 1: 1}, folder, range(2)).message == "rank 1 failed: ValueError: the cause"


def test_the_loss_of_a_peer_elsewhere_is_said(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    failed(folder, 0, RuntimeError("[pair.cc] Connection closed by peer [198.18.0.2]:1"), 1)
    error = explain({0: 1}, folder, range(1))
    assert "rank 0 lost contact with another rank" in error.message
    assert str(folder.log_file(0)) in (error.hint or "")


def test_a_signal_comes_before_what_it_caused(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    failed(folder, 0, ValueError("late"), 1)
    codes = {0: 1, 2: -signal.SIGSEGV, 3: -signal.SIGTERM}
    assert explain(codes, folder, range(4)).message == "rank 2 was ended by SIGSEGV."


def test_a_known_error_keeps_its_kind_and_hint(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    failed(folder, 1, DataError("a.bin is truncated.", hint="delete it"), 1)
    error = explain({1: 1}, folder, range(2))
    assert type(error) is DataError
    assert (error.message, error.hint, error.detail) == ("a.bin is truncated.", "delete it", None)


def test_a_rank_that_said_nothing(tmp_path: Path) -> None:
    error = explain({3: 9}, RunFolder.create(tmp_path), range(4))
    assert error.message == "rank 3 ended with exit code 9."


def test_a_rank_that_did_not_answer_is_named_with_where_it_was(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    failed(folder, 0, RuntimeError("[buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"), 1)
    stack = 'Stack (most recent call first):\n  File "own.py", line 3 in loss'
    folder.log_file(1).write_text(f"noise\n{stack}\n")
    error = explain({0: 1}, folder, range(2))
    assert error.message.startswith("rank 0 gave up waiting (Timed out waiting 4000ms")
    assert error.message.endswith("rank 1 did not answer.")
    assert error.detail == stack
