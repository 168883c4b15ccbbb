"""Time square matrix products on the threads of this process, in several number formats in turn."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

SIDE = 1024
"""Rows and columns of the matrices: large enough that reading them takes little of the time."""
FLOP = 2 * SIDE**3
"""Floating-point operations of one product."""
LEAST_PRODUCTS = 3


def fastest_products_s(dtypes: Sequence[torch.dtype], seconds: float) -> list[float]:
    """Return the time of the fastest product in each number format, measured for so many seconds in all.

    The fastest of several counts, since other programs can only slow one down.
    """
    operands = [[torch.full((SIDE, SIDE), 1 / SIDE, dtype=dtype) for _ in range(3)] for dtype in dtypes]
    times: list[list[float]] = [[] for _ in dtypes]
    began_s = time.perf_counter()
    while len(times[0]) <= LEAST_PRODUCTS or time.perf_counter() - began_s < seconds:
        for (left, right, out), own in zip(operands, times, strict=True):
            start_s = time.perf_counter()
            torch.mm(left, right, out=out)
            own.append(time.perf_counter() - start_s)
    return [min(own) for own in times]
