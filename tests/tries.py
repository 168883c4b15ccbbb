"""Measurements that other programs on the machine may disturb: taken again, a bounded number of times."""

from __future__ import annotations

from collections.abc import Callable

TRIES = 8


def eventually(check: Callable[[int], None], tries: int = TRIES) -> None:
    """Require that a check holds in one of a few tries; it gets the number of the try.

    Only for checks that a busy machine can make fail, and that it cannot make hold.
    """
    for attempt in range(tries):
        try:
            check(attempt)
            return
        except AssertionError:
            if attempt == tries - 1:
                raise
