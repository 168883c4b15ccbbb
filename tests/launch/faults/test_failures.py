"""Root cause of a failed job: the choice among several failures."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import DataError, RankError, RecordError
from paceline.launch.faults.failures import find_root_cause, record_failure
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
    advice = "This is typically caused by a remote worker crashing. Check the logs of the remote worker. GLHF!"
    write_failure(folder, 0, RuntimeError(f"[pair.cc] Connection closed by peer [198.18.0.2]:1. {advice}"), 1)
    error = find_root_cause({0: 1}, folder, range(1))
    assert error.message == "rank 0 lost the connection to another rank: Connection closed by peer [198.18.0.2]:1."
    assert str(folder.log_file(0)) in (error.hint or "")


def test_a_rank_killed_by_a_signal_is_the_root_cause(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    write_failure(folder, 0, ValueError("late"), 1)
    codes = {0: 1, 2: -signal.SIGSEGV, 3: -signal.SIGTERM}
    assert find_root_cause(codes, folder, range(4)).message == "rank 2 was killed by SIGSEGV."


WHAT = "what():  [enforce fail at /gloo/pair.cc:456] op.preamble.length <= op.nbytes. 400 vs 200. Received data size"
COLLECTIVE = '  File "/lib/site-packages/torch/distributed/distributed_c10d.py", line 3245 in all_reduce'


def test_a_mismatch_of_collectives_is_recognised_in_the_log(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    stack = f'Thread 0x1 (most recent call first):\n{COLLECTIVE}\n  File "/home/me/own.py", line 7 in agree'
    folder.log_file(1).write_text(f"a line\nterminate called after throwing\n  {WHAT}\n{stack}\n")
    error = find_root_cause({1: -signal.SIGABRT}, folder, range(2))
    assert error.message == (
        "rank 1 was killed by SIGABRT: ranks called different collectives, or the same one with different sizes "
        "(a message of 400 B arrived instead of 200 B; rank 1 was in all_reduce at own.py:7)."
    )
    assert error.detail == stack


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("terminate called after throwing\n  what():  the file is damaged\n", ": the file is damaged"),
        ("terminate called without an active exception\n", ": terminate called without an active exception"),
        ("free(): invalid pointer\nFatal Python error: Aborted\n", ": free(): invalid pointer"),
        ("own.c:12: sum: Assertion `n > 0' failed.\n", ": own.c:12: sum: Assertion `n > 0' failed"),
        ("nothing of use\n", ""),
    ],
)
def test_an_abort_is_shown_with_its_cause(tmp_path: Path, log: str, cause: str) -> None:
    folder = RunFolder.create(tmp_path)
    folder.log_file(0).write_text(log)
    assert find_root_cause({0: -signal.SIGABRT}, folder, [0]).message == f"rank 0 was killed by SIGABRT{cause}."


@pytest.mark.parametrize(
    ("number", "hint"), [(signal.SIGKILL, "out of memory"), (signal.SIGSEGV, "native code"), (64, "")]
)
def test_a_signal_has_its_own_hint(tmp_path: Path, number: int, hint: str) -> None:
    folder = RunFolder.create(tmp_path)
    error = find_root_cause({0: -number}, folder, [0])
    assert hint in (error.hint or "")
    assert str(folder.log_file(0)) in (error.hint or "")


def test_ranks_in_different_collectives_are_named(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    for rank, name in ((0, "all_reduce"), (1, "broadcast")):
        write_failure(folder, rank, RuntimeError("[buffer.cc:78] Timed out waiting 4000ms for recv"), rank)
        content = json.loads(folder.error_file(rank).read_text())
        traceback = f'  File "/own.py", line {7 + rank}, in agree\n    here\n{COLLECTIVE[:-14]}, in {name}\n'
        folder.error_file(rank).write_text(json.dumps(content | {"detail": traceback}))
    error = find_root_cause({0: 1, 1: 1}, folder, range(2))
    assert error.message.endswith("rank 0 was in all_reduce at own.py:7, rank 1 was in broadcast at own.py:8.")
    assert "call the same collectives" in (error.hint or "")


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


ALLOCATOR = "[enforce fail at alloc_cpu.cpp:116] err == 0. DefaultCPUAllocator: can't allocate memory: 9000000 bytes"
CUDA = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.00 GiB of which 2 are free."


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError(CUDA), "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."),
        (MemoryError(), "MemoryError."),
        (RuntimeError(ALLOCATOR), f"RuntimeError: {ALLOCATOR}."),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
    ],
)
def test_a_lack_of_memory_is_recognised(tmp_path: Path, error: Exception, message: str | None) -> None:
    folder = RunFolder.create(tmp_path)
    write_failure(folder, 1, error, 1)
    write_failure(folder, 0, RuntimeError("[pair.cc] Connection closed by peer [127.0.0.1]:1"), 2)
    found = find_root_cause({0: 1, 1: 1}, folder, range(2))
    assert isinstance(found, RankError)
    assert found.out_of_memory
    assert found.message.startswith("rank 1 ran out of memory: ")
    assert message is None or found.message == f"rank 1 ran out of memory: {message}"
    assert "use a smaller batch" in (found.hint or "")


def test_a_rank_killed_by_the_kernel_is_probably_out_of_memory(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    found = find_root_cause({1: -signal.SIGKILL}, folder, range(2))
    assert isinstance(found, RankError)
    assert found.message == "rank 1 was killed by SIGKILL, probably because the host ran out of memory."
    assert found.out_of_memory == "probably"
    folder.log_file(0).write_text("terminate called after throwing\n  what():  std::bad_alloc\n")
    found = find_root_cause({0: -signal.SIGABRT}, folder, range(2))
    assert isinstance(found, RankError)
    assert found.out_of_memory is True
    found = find_root_cause({0: -signal.SIGSEGV}, folder, range(2))
    assert isinstance(found, RankError)
    assert not found.out_of_memory
