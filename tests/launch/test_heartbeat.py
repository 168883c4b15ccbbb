"""Detection of followers that abort or stop sending heartbeats."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from paceline.launch import heartbeat, rendezvous
from paceline.launch.heartbeat import HeartbeatMonitor, send_heartbeats
from paceline.launch.store_channel import StoreChannel


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> StoreChannel:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.02)
    listener = rendezvous.bind()
    port = listener.getsockname()[1]
    return StoreChannel(rendezvous.open_store("127.0.0.1", port, listener, timedelta(seconds=10)), f"127.0.0.1:{port}")


def lost_within(monitor: HeartbeatMonitor, limit_s: float) -> set[int]:
    deadline = time.monotonic() + limit_s
    while not monitor.lost() and time.monotonic() < deadline:
        time.sleep(0.01)
    return monitor.lost()


def test_a_host_with_heartbeats_is_not_lost(channel: StoreChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "LOST_AFTER_S", 0.5)
    with send_heartbeats(channel, 1):
        assert lost_within(HeartbeatMonitor(channel, [1]), 1.0) == set()


def test_a_host_without_heartbeats_is_lost_after_the_limit(
    channel: StoreChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "LOST_AFTER_S", 0.3)
    monitor = HeartbeatMonitor(channel, [1, 2])
    with send_heartbeats(channel, 2):
        assert lost_within(monitor, 0.1) == set(), "not at once"
        assert lost_within(monitor, 2.0) == {1}


def test_a_host_that_aborts_is_lost_at_once(channel: StoreChannel) -> None:
    monitor = HeartbeatMonitor(channel, [1, 2])
    with pytest.raises(KeyboardInterrupt), send_heartbeats(channel, 2):
        raise KeyboardInterrupt
    assert lost_within(monitor, 1.0) == {2}


def test_a_host_that_finished_is_not_lost(channel: StoreChannel) -> None:
    monitor = HeartbeatMonitor(channel, [1])
    with send_heartbeats(channel, 1):
        pass
    assert lost_within(monitor, 0.3) == set()
