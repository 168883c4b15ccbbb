"""Status of a rank: messages from anywhere, and the stack of the main thread."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm.watchdog.statuses import status, waiting
from paceline.comm.watchdog.status import decode, encode, main_thread_frames, operation_status
from paceline.measure.activity import RankActivity
from paceline.measure.steps import make_stopwatch
from paceline.records.timeline import NO_PEER, RowKind


def test_a_status_is_sent_whole() -> None:
    assert decode(encode(waiting(2)).encode()) == waiting(2)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff\xfe", b'{"rank": "a"}', encode(status(0)).encode()[:-9]])
def test_other_messages_are_ignored(content: bytes) -> None:
    assert decode(content) is None


@given(st.binary())
def test_any_bytes_are_read_without_an_error(content: bytes) -> None:
    decode(content)


def test_the_stack_is_that_of_the_main_thread() -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.extend(frame.function for frame in main_thread_frames()))
    thread.start()
    thread.join()
    assert "test_the_stack_is_that_of_the_main_thread" in found
    assert "main_thread_frames" not in [frame.function for frame in main_thread_frames()]


def test_the_operation_in_progress_is_the_oldest_that_has_not_ended() -> None:
    import torch

    stopwatch, activity = make_stopwatch(torch.device("cpu"), events=True), RankActivity()
    activity.follow(stopwatch, first_step=40)
    log = stopwatch.operations
    assert log is not None
    stopwatch.begin()
    assert (activity.step, activity.phase) == (40, "loading data")
    first, second, third = (log.start(RowKind.ALL_REDUCE, size, NO_PEER, members=[0, 1]) for size in (8, 16, 32))
    log.poll_later(second, lambda: True)
    before = activity.progress
    log.end(first)
    assert activity.progress != before
    found = operation_status(activity)
    assert found is not None
    assert (found.kind, found.bytes, found.number, found.members) == ("all_reduce", 32, 2, [0, 1])
    log.end(third)
    assert operation_status(activity) is None
