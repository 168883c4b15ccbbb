"""Which hosts are still there: those that follow have a pulse, and say so when they leave; the leader listens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from paceline.errors import LaunchError
from paceline.launch.store_channel import StoreChannel

BEAT_S = 1.0
SILENT_S = 12.0
"""How long nothing may be heard of a host, on a machine that has much else to do, before it counts as gone."""


@contextmanager
def send_heartbeats(channel: StoreChannel, launcher: int) -> Iterator[None]:
    """Has a pulse for the length of a `with`; whoever leaves it by an exception says so."""
    done = threading.Event()

    def beat() -> None:
        with suppress(LaunchError):  # The leader is gone: whoever waits for it finds out.
            while not done.wait(BEAT_S):
                channel.count(_pulse(launcher))

    thread = threading.Thread(target=beat, daemon=True, name="paceline-pulse")
    thread.start()
    try:
        yield
    except BaseException:
        with suppress(LaunchError):
            channel.post(_farewell(launcher), None)
        raise
    finally:
        done.set()
        thread.join()


class HeartbeatMonitor:
    """The leader's view of who is there."""

    def __init__(self, channel: StoreChannel, launchers: Sequence[int]) -> None:
        self._mail = channel
        self._gone: set[int] = set()
        self._heard = {launcher: (0, time.monotonic()) for launcher in launchers}
        self._listened = 0.0

    def gone(self) -> set[int]:
        """The seats that have left, or of which nothing was heard for long."""
        now = time.monotonic()
        if now - self._listened < BEAT_S / 4:  # Others ask often.
            return self._gone
        self._listened = now
        for launcher, (count, since) in self._heard.items():
            found = self._mail.count(_pulse(launcher), by=0)
            if found != count:
                self._heard[launcher] = found, now
            elif now - since > SILENT_S or self._mail.has(_farewell(launcher)):
                self._gone.add(launcher)
        return self._gone


def _pulse(launcher: int) -> str:
    return f"pulse-{launcher}"


def _farewell(launcher: int) -> str:
    return f"left-{launcher}"
