"""Hand-made timelines for tests with known results."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paceline.records.timeline import NO_PEER, ROW, Purpose, RowKind, Timeline

FIRST = 10
"""Number of the first step, after any warm-up."""


def operation(
    kind: RowKind,
    start_s: float,
    end_s: float,
    size: int = 0,
    *,
    step: int = FIRST,
    peer: int = NO_PEER,
    purpose: Purpose = Purpose.GRADIENTS,
    wait_start_s: float = math.nan,
) -> tuple[Any, ...]:
    """Return the row of an operation."""
    return step, kind, purpose, peer, size, start_s, end_s, wait_start_s, math.nan


def phase(
    kind: RowKind, start_s: float, end_s: float, *, step: int = FIRST, cpu_s: float = math.nan
) -> tuple[Any, ...]:
    """Return the row of a phase or of a whole step."""
    return step, kind, Purpose.NOTHING, NO_PEER, 0, start_s, end_s, math.nan, cpu_s


def timeline(*rows: tuple[Any, ...]) -> Timeline:
    """Return a timeline of rows in any order; without a step row, one that spans all rows is added."""
    content = list(rows)
    if not any(row[1] == RowKind.STEP for row in rows):
        content.append(
            phase(RowKind.STEP, min((row[5] for row in rows), default=0.0), max((row[6] for row in rows), default=1.0))
        )
    table = np.array(content, dtype=ROW)
    return Timeline(table[np.argsort(table["start_s"], kind="stable")])
