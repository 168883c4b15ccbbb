"""Tests of the clock of a GPU, with events that need none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.measure.clock import CudaClock


class Event:
    """Event that is reached at once."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> CudaClock:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return CudaClock()


def test_released_events_are_used_again(clock: CudaClock) -> None:
    first, second = clock.mark(), clock.mark()
    assert first is not second
    clock.release(first)
    assert clock.mark() is first
    assert clock.mark() is not first


class TakenByAnotherThread(list[Any]):
    """List whose last element another thread takes between a look at it and `pop`."""

    def __len__(self) -> int:
        return 1


def test_another_thread_may_take_the_last_event(clock: CudaClock) -> None:
    clock._free = TakenByAnotherThread()
    assert isinstance(clock.mark(), Event)
