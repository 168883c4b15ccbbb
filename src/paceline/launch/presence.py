"""Which hosts are still there: those that follow have a pulse, and say so when they leave; the leader listens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from paceline.errors import LaunchError
from paceline.launch.mail import Mail

BEAT_S = 1.0
SILENT_S = 12.0
"""How long nothing may be heard of a host, on a machine that has much else to do, before it counts as gone."""


@contextmanager
def present(mail: Mail, seat: int) -> Iterator[None]:
    """Has a pulse for the length of a `with`; whoever leaves it by an exception says so."""
    done = threading.Event()

    def beat() -> None:
        with suppress(LaunchError):  # The leader is gone: whoever waits for it finds out.
            while not done.wait(BEAT_S):
                mail.count(_pulse(seat))

    thread = threading.Thread(target=beat, daemon=True, name="paceline-pulse")
    thread.start()
    try:
        yield
    except BaseException:
        with suppress(LaunchError):
            mail.post(_farewell(seat), None)
        raise
    finally:
        done.set()
        thread.join()


class Presence:
    """The leader's view of who is there."""

    def __init__(self, mail: Mail, seats: Sequence[int]) -> None:
        self._mail = mail
        self._gone: set[int] = set()
        self._heard = {seat: (0, time.monotonic()) for seat in seats}
        self._listened = 0.0

    def gone(self) -> set[int]:
        """The seats that have left, or of which nothing was heard for long."""
        now = time.monotonic()
        if now - self._listened < BEAT_S / 4:  # Others ask often.
            return self._gone
        self._listened = now
        for seat, (count, since) in self._heard.items():
            found = self._mail.count(_pulse(seat), by=0)
            if found != count:
                self._heard[seat] = found, now
            elif now - since > SILENT_S or self._mail.has(_farewell(seat)):
                self._gone.add(seat)
        return self._gone


def _pulse(seat: int) -> str:
    return f"pulse-{seat}"


def _farewell(seat: int) -> str:
    return f"left-{seat}"
