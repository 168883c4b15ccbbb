"""Retries of measurements that other programs on the machine may disturb."""

from __future__ import annotations

from collections.abc import Callable

TRIES = 8


def eventually(check: Callable[[int], None], tries: int = TRIES) -> None:
    """Require that a check passes in one of `tries` attempts; it gets the number of the attempt, from 0.

    Only for checks that a busy machine can make fail, but cannot make pass.
    """
    for attempt in range(tries):
        try:
            check(attempt)
            return
        except AssertionError:
            if attempt == tries - 1:
                raise
