"""Sentences about a hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from comm.watchdog.statuses import ALL_REDUCE, C10D, SLEEPING, hang_of, status, waiting
from paceline.comm.watchdog.description import Surroundings, all_stacks, hang_error, rank_names
from paceline.comm.watchdog.status import Frame, OperationStatus

NOTHING = Surroundings()
IN_LIBRARY = [Frame("/lib/site-packages/torch/autograd/graph.py", 1, "_engine_run_backward")]


def test_a_rank_that_sleeps_is_named_with_its_place() -> None:
    ranks = [waiting(rank, frames=IN_LIBRARY) for rank in range(3)]
    error = hang_error(hang_of(*ranks, status(3, frames=SLEEPING)), NOTHING, Path("errors/hang.txt"))
    assert error.message == (
        "step 412: ranks 0-2 wait in all_reduce (bucket 3, 4.00 kB, with ranks 0-3); rank 3 was last seen in "
        "load_batch (data.py:57), loading data, 61 s ago."
    )
    assert error.hint == (
        "if rank 3 really takes that long here, use --hang-timeout 300; the stacks of all ranks are in errors/hang.txt"
    )
    assert error.detail is not None
    assert error.detail.splitlines()[1] == '  File "/home/me/data.py", line 57 in load_batch'
    assert error.exit_code == 13


def test_a_stopped_process_is_named() -> None:
    hang = hang_of(waiting(0), status(1, step=411), silent=(1,))
    error = hang_error(hang, Surroundings({1: "T"}, {0: "host 0 (a)", 1: "host 1 (b)"}), None)
    assert "step 412: rank 0 waits in all_reduce" in error.message, "the step of the rank whose status is not old"
    assert "rank 1 is stopped (process 101 on host 1 (b), state T), and was last seen loading data, in step 411" in (
        error.message
    )
    assert "what stopped the process" in (error.hint or "")


@pytest.mark.parametrize(
    ("states", "found", "hint"),
    [
        ({}, "rank 1 does not answer (nothing arrives from its process on b), and was last seen", "the network"),
        ({1: "S"}, "rank 1 does not answer (its process holds Python's lock in native code)", "--hang-timeout 300"),
    ],
)
def test_a_silent_rank(states: dict[int, str], found: str, hint: str) -> None:
    around = Surroundings(states, {0: "a", 1: "b"}, {1: "Stack (most recent call first):\n  File native"})
    error = hang_error(hang_of(waiting(0), status(1), silent=(1,)), around, None)
    assert found in error.message
    assert hint in (error.hint or "")
    assert "File native" in (error.detail or "")


def test_ranks_in_different_operations_are_told_apart() -> None:
    scatter = OperationStatus(kind="scatter", bytes=8, purpose="gradients", number=1, peer=0)
    other = waiting(1, phase="synchronising gradients", operation=scatter, frames=[Frame(C10D, 1, "scatter")])
    error = hang_error(hang_of(waiting(0), other), NOTHING, None)
    assert "rank 0 waits in all_reduce (bucket 3, 4.00 kB, with ranks 0-3) at own.py:7" in error.message
    assert "rank 1 waits in scatter (operation 2 of the step, 8 B, from rank 0)" in error.message
    assert "--check-collectives names both calls" in (error.hint or "")
    assert error.detail is None
    checked = hang_error(hang_of(waiting(0), other), Surroundings(checks_collectives=True), None)
    assert "--check-collectives" not in (checked.hint or "")


def test_all_ranks_in_the_same_operation() -> None:
    error = hang_error(hang_of(waiting(0), waiting(1)), NOTHING, None)
    assert error.message.endswith("ranks 0, 1 wait in all_reduce (bucket 3, 4.00 kB, with ranks 0-3) at own.py:7.")
    assert "`paceline doctor` tests all links" in (error.hint or "")


def test_an_operation_in_progress_does_not_mean_that_the_rank_waits() -> None:
    """A hook of the user's that sleeps in backward, while a bucket is sent."""
    error = hang_error(hang_of(waiting(0), waiting(1, frames=SLEEPING)), NOTHING, None)
    assert "rank 1 was last seen in load_batch (data.py:57), in the backward pass" in error.message


def test_without_recorded_operations_the_stack_says_what_a_rank_waits_in() -> None:
    plain = status(0, phase="", frames=[Frame(C10D, 1, "all_reduce"), Frame("/home/me/own.py", 7, "agree")])
    ddp = status(1, phase="", frames=[*IN_LIBRARY, Frame("/home/me/own.py", 8, "main")])
    error = hang_error(hang_of(plain, ddp, status(2, frames=SLEEPING)), Surroundings(in_program=True), None)
    assert "rank 0 waits in all_reduce at own.py:7; rank 1 waits in backward at own.py:8; rank 2 was" in error.message
    assert "attach(…, hang_timeout=300)" in (error.hint or "")


def test_messages_name_the_other_rank() -> None:
    sends = OperationStatus(kind="send", bytes=8, purpose="gradients", number=0, peer=1)
    error = hang_error(hang_of(waiting(0, operation=sends), status(1, frames=SLEEPING)), NOTHING, None)
    assert "waits in send (operation 1 of the step, 8 B, to rank 1)" in error.message


def test_a_name_with_braces_is_kept() -> None:
    found = status(1, frames=[Frame("/home/me/{was}.py", 5, "load")])
    assert "in load ({was}.py:5)" in hang_error(hang_of(waiting(0), found), NOTHING, None).message


def test_the_file_has_the_stacks_of_all_ranks() -> None:
    text = all_stacks(hang_of(waiting(0), status(1, frames=SLEEPING)), NOTHING)
    assert "rank 0 waits in all_reduce" in text
    assert "rank 1 was last seen in load_batch" in text
    assert text.count("most recent call first") == 2


def test_ranks_in_words() -> None:
    assert rank_names([3]) == "rank 3"
    assert rank_names([1, 0]) == "ranks 0, 1"
    assert rank_names([0, 1, 2, 5]) == "ranks 0-2, 5"
    assert ALL_REDUCE.members == [0, 1, 2, 3]
