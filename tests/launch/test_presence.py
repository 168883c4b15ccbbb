"""Hosts that leave, or fall silent, are noticed."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from paceline.launch import presence, rendezvous
from paceline.launch.mail import Mail
from paceline.launch.presence import Presence, present


@pytest.fixture
def mail(monkeypatch: pytest.MonkeyPatch) -> Mail:
    monkeypatch.setattr(presence, "BEAT_S", 0.02)
    listener = rendezvous.bind()
    port = listener.getsockname()[1]
    return Mail(rendezvous.open_store("127.0.0.1", port, listener, timedelta(seconds=10)), f"127.0.0.1:{port}")


def gone_within(found: Presence, limit_s: float) -> set[int]:
    deadline = time.monotonic() + limit_s
    while not found.gone() and time.monotonic() < deadline:
        time.sleep(0.01)
    return found.gone()


def test_a_host_with_a_pulse_is_there(mail: Mail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "SILENT_S", 0.5)
    with present(mail, 1):
        assert gone_within(Presence(mail, [1]), 1.0) == set()


def test_a_host_without_a_pulse_is_gone_after_a_while(mail: Mail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "SILENT_S", 0.3)
    found = Presence(mail, [1, 2])
    with present(mail, 2):
        assert gone_within(found, 0.1) == set(), "not at once"
        assert gone_within(found, 2.0) == {1}


def test_a_host_that_fails_says_so_at_once(mail: Mail) -> None:
    found = Presence(mail, [1, 2])
    with pytest.raises(KeyboardInterrupt), present(mail, 2):
        raise KeyboardInterrupt
    assert gone_within(found, 1.0) == {2}


def test_a_host_that_is_done_is_not_missed(mail: Mail) -> None:
    found = Presence(mail, [1])
    with present(mail, 1):
        pass
    assert gone_within(found, 0.3) == set()
