"""Detection of followers that abort or stop sending heartbeats."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from types import SimpleNamespace

import pytest

from commands import wait_until
from paceline.errors import LaunchError
from paceline.launch import rendezvous
from paceline.launch.channel import heartbeat
from paceline.launch.channel.heartbeat import LOST_AFTER_FAILURE_S, LOST_AFTER_S, HeartbeatMonitor, send_heartbeats
from paceline.launch.channel.store_channel import StoreChannel
from paceline.signing import Signer


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> StoreChannel:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.02)
    listener = rendezvous.bind()
    port = listener.getsockname()[1]
    store = rendezvous.open_store("127.0.0.1", port, listener, timedelta(seconds=10))
    return StoreChannel(store, f"127.0.0.1:{port}", Signer(b"key of the launch"), pytest.fail)


def heartbeats_of(
    launcher: int,
    channel: StoreChannel,
    on_answer: Callable[[], object] = lambda: None,
    on_silence: Callable[[], None] = lambda: None,
) -> AbstractContextManager[None]:
    """Send heartbeats of a launcher in a `with` block."""
    return send_heartbeats(channel, launcher, on_answer=on_answer, on_silence=on_silence)


class FakeClockMonitor:
    """Heartbeat monitor with a clock that only advances on request, so that a busy machine has no effect."""

    def __init__(self, channel: StoreChannel, launchers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        self._channel, self._now_s = channel, 100.0
        monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: self._now_s))
        self._monitor = HeartbeatMonitor(channel, launchers)

    def lost_after(self, seconds: float, *, after_failure: bool = False) -> set[int]:
        """Advance the clock; return the launchers that are lost then."""
        self._now_s += seconds
        return self._monitor.lost(after_failure=after_failure)

    def forget(self, launchers: set[int]) -> None:
        """Stop watching launchers."""
        self._monitor.forget(launchers)

    def wait_for_heartbeat(self, launcher: int) -> None:
        """Wait until the next heartbeat of a launcher arrives."""
        before = self._heartbeats(launcher)
        wait_until(lambda: self._heartbeats(launcher) > before, f"a heartbeat of launcher {launcher}")

    def _heartbeats(self, launcher: int) -> int:
        return self._channel.find(heartbeat._heartbeat_key(launcher), int) or 0


def test_a_host_with_heartbeats_is_not_lost(channel: StoreChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = FakeClockMonitor(channel, [1], monkeypatch)
    with heartbeats_of(1, channel):
        for _ in range(3):
            monitor.wait_for_heartbeat(1)
            assert monitor.lost_after(0.9 * LOST_AFTER_S) == set()


def test_a_host_without_heartbeats_is_lost_after_the_limit(
    channel: StoreChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = FakeClockMonitor(channel, [1, 2], monkeypatch)
    with heartbeats_of(2, channel):
        monitor.wait_for_heartbeat(2)
        assert monitor.lost_after(0.9 * LOST_AFTER_S) == set(), "not at once"
        monitor.wait_for_heartbeat(2)
        assert monitor.lost_after(0.2 * LOST_AFTER_S) == {1}


def test_a_host_that_aborts_is_lost_at_once(channel: StoreChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = FakeClockMonitor(channel, [1, 2], monkeypatch)
    with pytest.raises(KeyboardInterrupt), heartbeats_of(2, channel):
        raise KeyboardInterrupt
    monitor.lost_after(0.1)  # A last heartbeat may have arrived, which is read first.
    assert monitor.lost_after(0.1) == {2}


def test_a_host_that_finished_is_not_lost(channel: StoreChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = FakeClockMonitor(channel, [1], monkeypatch)
    with heartbeats_of(1, channel):
        pass
    assert [monitor.lost_after(0.3 * LOST_AFTER_S) for _ in range(3)] == [set()] * 3


def test_silence_is_judged_sooner_after_a_failure(channel: StoreChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = FakeClockMonitor(channel, [1, 2], monkeypatch)
    monitor.lost_after(0.0)
    assert monitor.lost_after(1.5 * LOST_AFTER_FAILURE_S) == set()
    assert monitor.lost_after(1.0, after_failure=True) == {1, 2}
    monitor.forget({2})
    assert monitor.lost_after(1.0) == {1}


def test_a_leader_that_does_not_answer_is_given_up(channel: StoreChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of the store blocks if the link is cut; here it does so until the end of the test."""
    monkeypatch.setattr(heartbeat, "LOST_AFTER_S", 0.05)
    cut, silent = threading.Event(), threading.Event()
    monkeypatch.setattr(channel, "post", lambda *_: cut.wait(10))
    with heartbeats_of(1, channel, on_silence=silent.set):
        assert silent.wait(10)
        with pytest.raises(LaunchError, match=r"lost the connection to host 0 at .*: it has not answered for 0.05 s"):
            channel.has("key")
        cut.set()


def test_each_answer_of_the_leader_is_reported(channel: StoreChannel) -> None:
    """A follower reads the end of its leader so, whatever its main thread does."""
    found = threading.Event()
    with heartbeats_of(1, channel, on_answer=lambda: found.set() if channel.has("end") else None):
        channel.post("end", True)
        assert found.wait(60)
