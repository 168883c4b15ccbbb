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

    def record(self, stream: str) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        pass


class Streams:
    """Streams of a device, one of which is current."""

    def __init__(self) -> None:
        self.current = 0
        self.searches = 0

    def handle(self, device: int) -> int:
        assert device == 1
        return self.current

    def search(self, device: int) -> str:
        self.searches += 1
        return f"stream {self.handle(device)}"


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams.handle, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", streams.search)
    return streams


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, streams: Streams) -> CudaClock:  # noqa: ARG001
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return CudaClock(torch.device("cuda", 1))


def test_marks_are_those_of_the_stream_that_is_current(clock: CudaClock, streams: Streams) -> None:
    assert [clock.mark().stream for _ in range(3)] == ["stream 0"] * 3
    streams.current = 7
    assert [clock.mark().stream for _ in range(3)] == ["stream 7"] * 3
    streams.current = 0
    assert clock.mark().stream == "stream 0"
    assert streams.searches == 2, "it takes longer than an event"


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
