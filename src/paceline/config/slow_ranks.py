"""Which ranks are slowed on purpose, and by how much, as `1:3,2:1.5` says it. Free of torch."""

from __future__ import annotations

import math
import re

from paceline.errors import UsageError

OPTION = "--slow-rank"
MOST = 1000.0
"""A rank that is slower than this would only be waited for."""
NOBODY = "none"

_FORMS = "write it as RANK:FACTOR, as in 1:3 for a rank 1 that takes three times as long; several as 1:3,2:1.5"


def parse_slow_ranks(text: str) -> dict[int, float]:
    """By rank, how many times as long it computes. Reads `1:3` and `1:3,2:1.5`; a plus may stand for a comma.

    `--vary` has its own meaning for commas, so there several ranks are written with a plus.
    """
    found: dict[int, float] = {}
    for item in re.split(r"[,+]", text) if text.strip() not in ("", NOBODY) else []:
        rank, _, factor = (part.strip() for part in item.partition(":"))
        times = _number(factor)
        if not rank.isdecimal() or times is None:
            raise UsageError(f"{OPTION} {text!r} does not say which rank, and how slow: {item.strip()!r}.", hint=_FORMS)
        if not 1 <= times <= MOST:
            raise UsageError(
                f"{OPTION} {text!r} makes rank {int(rank)} {factor} times as slow.",
                hint=f"the factor has to be from 1 to {MOST:g}: ranks can be slowed down, not sped up",
            )
        if int(rank) in found:
            raise UsageError(f"{OPTION} {text!r} names rank {int(rank)} twice.", hint=_FORMS)
        found[int(rank)] = times
    return found


def check_slow_ranks(slowed: dict[int, float], ranks: int) -> None:
    """Refuses a rank that there is none of."""
    missing = [rank for rank in slowed if rank >= ranks]
    if missing:
        there = "there is only rank 0" if ranks == 1 else f"there are ranks 0 to {ranks - 1}"
        raise UsageError(
            f"{OPTION} names rank {missing[0]}, but {there}.", hint="name one of them, or start more with --ranks"
        )


def format_slow_ranks(slowed: dict[int, float]) -> str:
    """As `rank 1 was made 3× as slow`; empty where nobody was."""
    named = [f"rank {rank} was made {factor:g}× as slow" for rank, factor in sorted(slowed.items()) if factor > 1]
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
