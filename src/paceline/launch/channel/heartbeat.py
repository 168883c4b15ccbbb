"""Heartbeats: followers post a growing number once per second, and the leader detects those that stopped.

The number is signed, as every message, so that nobody else can keep a lost host alive; an old one does not count.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress

from paceline.errors import LaunchError
from paceline.launch.channel.store_channel import StoreChannel

HEARTBEAT_S = 1.0
LOST_AFTER_S = 12.0
"""Seconds without a heartbeat after which a follower counts as lost; long enough for a busy machine."""
LOST_AFTER_FAILURE_S = 4.0
"""The same once ranks have failed: they probably lost their peers on that host."""


@contextmanager
def send_heartbeats(
    channel: StoreChannel, launcher: int, *, on_answer: Callable[[], object], on_silence: Callable[[], None]
) -> Iterator[None]:
    """Send heartbeats for the duration of a `with` block; report an abort if an exception leaves the block.

    `on_answer` is called after each one that the leader's store has answered. If the store does not answer for
    `LOST_AFTER_S`, the channel is given up, and `on_silence` is called. A call of the store blocks for minutes if the
    link is cut, so threads that may block send heartbeats and use the channel.
    """
    done = threading.Event()
    answered = [time.monotonic()]

    def beat() -> None:
        with suppress(LaunchError):  # The connection to the leader is lost; the main thread raises the error.
            for count in itertools.count(1):
                if done.wait(HEARTBEAT_S):
                    return
                channel.post(_heartbeat_key(launcher), count)
                channel.has(_heartbeat_key(launcher))  # Only reading waits for an answer of the store.
                channel.restore()
                answered[0] = time.monotonic()
                on_answer()

    def watch() -> None:
        while not done.wait(HEARTBEAT_S):
            if time.monotonic() > answered[0] + LOST_AFTER_S:
                channel.give_up(LOST_AFTER_S)
                on_silence()
                return

    threads = [threading.Thread(target=beat, daemon=True, name="paceline-heartbeat")]
    threads.append(threading.Thread(target=watch, daemon=True, name="paceline-leader-watch"))
    for thread in threads:
        thread.start()
    try:
        yield
    except BaseException:
        with suppress(LaunchError):
            channel.post(_aborted_key(launcher), True)
        raise
    finally:
        done.set()
        for thread in threads:
            thread.join(HEARTBEAT_S)


class HeartbeatMonitor:
    """The leader's record of each follower's last heartbeat."""

    def __init__(self, channel: StoreChannel, launchers: Sequence[int]) -> None:
        self._channel = channel
        self._lost: set[int] = set()
        self._last_beats = {launcher: (0, time.monotonic()) for launcher in launchers}
        self._checked_at_s = 0.0

    def lost(self, *, after_failure: bool = False) -> set[int]:
        """Return the launchers that aborted or sent no heartbeat for a time, which is shorter after a failure."""
        limit_s = LOST_AFTER_FAILURE_S if after_failure else LOST_AFTER_S
        now = time.monotonic()
        if now - self._checked_at_s < HEARTBEAT_S / 4:  # Callers poll faster than heartbeats arrive.
            return self._lost
        self._checked_at_s = now
        self._channel.restore()
        for launcher, (count, since) in self._last_beats.items():
            found = self._channel.find(_heartbeat_key(launcher), int) or 0
            if found > count:
                self._last_beats[launcher] = found, now
            elif now - since > limit_s or self._channel.has(_aborted_key(launcher)):
                self._lost.add(launcher)
        return self._lost

    def forget(self, launchers: Set[int]) -> None:
        """Stop watching launchers, which the launch goes on without."""
        self._lost -= launchers
        for launcher in launchers:
            self._last_beats.pop(launcher, None)


def _heartbeat_key(launcher: int) -> str:
    return f"heartbeat-{launcher}"


def _aborted_key(launcher: int) -> str:
    return f"aborted-{launcher}"
