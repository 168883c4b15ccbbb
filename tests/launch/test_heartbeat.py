"""Hosts that leave, or fall silent, are noticed."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest

from commands import wait_until
from paceline.launch import heartbeat as presence
from paceline.launch import rendezvous
from paceline.launch.heartbeat import SILENT_S, HeartbeatMonitor, send_heartbeats
from paceline.launch.store_channel import StoreChannel


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> StoreChannel:
    monkeypatch.setattr(presence, "BEAT_S", 0.02)
    listener = rendezvous.bind()
    port = listener.getsockname()[1]
    return StoreChannel(rendezvous.open_store("127.0.0.1", port, listener, timedelta(seconds=10)), f"127.0.0.1:{port}")


class Leader:
    """The leader's view, on a clock that stands still unless it is told to go on: a busy machine changes nothing."""

    def __init__(self, channel: StoreChannel, launchers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        self._mail, self._now = channel, 100.0
        monkeypatch.setattr(presence, "time", SimpleNamespace(monotonic=lambda: self._now))
        self._found = HeartbeatMonitor(channel, launchers)

    def gone_after(self, seconds: float) -> set[int]:
        """The seats that are gone so much later."""
        self._now += seconds
        return self._found.gone()

    def wait_for_a_beat(self, launcher: int) -> None:
        """Wait until the next beat of a seat has come."""
        before = self._mail.count(presence._pulse(launcher), by=0)
        wait_until(lambda: self._mail.count(presence._pulse(launcher), by=0) > before, f"a beat of seat {launcher}")


def test_a_host_with_a_pulse_is_there(channel: StoreChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = Leader(channel, [1], monkeypatch)
    with send_heartbeats(channel, 1):
        for _ in range(3):
            leader.wait_for_a_beat(1)
            assert leader.gone_after(0.9 * SILENT_S) == set()


def test_a_host_without_a_pulse_is_gone_after_a_while(channel: StoreChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = Leader(channel, [1, 2], monkeypatch)
    with send_heartbeats(channel, 2):
        leader.wait_for_a_beat(2)
        assert leader.gone_after(0.9 * SILENT_S) == set(), "not at once"
        leader.wait_for_a_beat(2)
        assert leader.gone_after(0.2 * SILENT_S) == {1}


def test_a_host_that_fails_says_so_at_once(channel: StoreChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = Leader(channel, [1, 2], monkeypatch)
    with pytest.raises(KeyboardInterrupt), send_heartbeats(channel, 2):
        raise KeyboardInterrupt
    leader.gone_after(0.1)  # It may have had a beat, which comes first.
    assert leader.gone_after(0.1) == {2}


def test_a_host_that_is_done_is_not_missed(channel: StoreChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = Leader(channel, [1], monkeypatch)
    with send_heartbeats(channel, 1):
        pass
    assert [leader.gone_after(0.3 * SILENT_S) for _ in range(3)] == [set()] * 3
