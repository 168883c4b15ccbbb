"""Hosts that leave, or fall silent, are noticed."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from paceline.launch import heartbeat as presence
from paceline.launch import rendezvous
from paceline.launch.heartbeat import HeartbeatMonitor, send_heartbeats
from paceline.launch.store_channel import StoreChannel


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> StoreChannel:
    monkeypatch.setattr(presence, "BEAT_S", 0.02)
    listener = rendezvous.bind()
    port = listener.getsockname()[1]
    return StoreChannel(rendezvous.open_store("127.0.0.1", port, listener, timedelta(seconds=10)), f"127.0.0.1:{port}")


def gone_within(found: HeartbeatMonitor, limit_s: float) -> set[int]:
    deadline = time.monotonic() + limit_s
    while not found.gone() and time.monotonic() < deadline:
        time.sleep(0.01)
    return found.gone()


def test_a_host_with_a_pulse_is_there(channel: StoreChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "SILENT_S", 0.5)
    with send_heartbeats(channel, 1):
        assert gone_within(HeartbeatMonitor(channel, [1]), 1.0) == set()


def test_a_host_without_a_pulse_is_gone_after_a_while(channel: StoreChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "SILENT_S", 0.3)
    found = HeartbeatMonitor(channel, [1, 2])
    with send_heartbeats(channel, 2):
        assert gone_within(found, 0.1) == set(), "not at once"
        assert gone_within(found, 2.0) == {1}


def test_a_host_that_fails_says_so_at_once(channel: StoreChannel) -> None:
    found = HeartbeatMonitor(channel, [1, 2])
    with pytest.raises(KeyboardInterrupt), send_heartbeats(channel, 2):
        raise KeyboardInterrupt
    assert gone_within(found, 1.0) == {2}


def test_a_host_that_is_done_is_not_missed(channel: StoreChannel) -> None:
    found = HeartbeatMonitor(channel, [1])
    with send_heartbeats(channel, 1):
        pass
    assert gone_within(found, 0.3) == set()
