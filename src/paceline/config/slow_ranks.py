"""Parse `--slow-rank 1:3,2:1.5`: ranks to slow down on purpose, and their factors. Free of torch."""

from __future__ import annotations

import math
import re

from paceline.config.whole_number import whole_number
from paceline.errors import UsageError
from paceline.formatting import join_names, short, short_factor

OPTION = "--slow-rank"
MOST = 1000.0
"""Largest slow-down factor; beyond it a run would only wait for that rank."""
NO_RANK = "none"

_FORMS = "write it as RANK:FACTOR: 1:3 makes rank 1 compute three times as long; 1:3,2:1.5 slows two ranks"


def parse_slow_ranks(text: str) -> dict[int, float]:
    """Parse `1:3` or `1:3,2:1.5` into slow-down factors by rank.

    A plus may replace the comma, because `--vary` separates its values by commas.
    """
    found: dict[int, float] = {}
    for item in re.split(r"[,+]", text) if text.strip() not in ("", NO_RANK) else []:
        written, _, factor = (part.strip() for part in item.partition(":"))
        rank, times = whole_number(written), _number(factor)
        if rank is None or times is None:
            raise UsageError(f"{OPTION} {text!r} is not a rank with a factor: {item.strip()!r}.", hint=_FORMS)
        if not 1 <= times <= MOST:
            raise UsageError(
                f"{OPTION} {text!r} makes rank {rank} {factor} times as slow.",
                hint=f"the factor must be from 1 to {short(MOST)}: ranks can only be slowed down",
            )
        if rank in found:
            raise UsageError(f"{OPTION} {text!r} names rank {rank} twice.", hint=_FORMS)
        found[rank] = times
    return found


def check_slow_ranks(slowed: dict[int, float], ranks: int) -> None:
    """Raise if a slowed rank does not exist."""
    missing = [rank for rank in slowed if rank >= ranks]
    if missing:
        there = "there is only rank 0" if ranks == 1 else f"there are ranks 0 to {ranks - 1}"
        raise UsageError(
            f"{OPTION} names rank {missing[0]}, but {there}.", hint="name an existing rank, or start more with --ranks"
        )


def format_slow_ranks(slowed: dict[int, float]) -> str:
    """Format slowed ranks, as in `rank 1 was slowed down 3×`; empty if there are none."""
    named = [
        f"rank {rank} was slowed down {short_factor(factor)}" for rank, factor in sorted(slowed.items()) if factor > 1
    ]
    return join_names(named) if named else ""


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
