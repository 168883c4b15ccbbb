"""Measure the FLOP per second of a core in a matrix product, which model FLOP utilisation on a CPU is relative to."""

from __future__ import annotations

import time

import torch

from paceline.config import Precision
from paceline.measure.cores import usable_cores
from paceline.training.precision import AUTOCAST_TYPES, storage_dtype

SIDE = 1024
"""Rows and columns of the matrices: large enough that reading them takes little of the time."""
LEAST_S = 0.5
LEAST_PRODUCTS = 3


def measure_core_flop_per_s(precision: Precision) -> float:
    """Return the FLOP per second of the fastest product on all usable cores of this host, ÷ the cores.

    The fastest of several counts: other programs can only slow a product down.
    """
    cores = max(1, int(usable_cores()))
    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    dtype = AUTOCAST_TYPES.get(precision, storage_dtype(precision))
    left, right, out = (torch.full((SIDE, SIDE), 1 / SIDE, dtype=dtype) for _ in range(3))
    times: list[float] = []
    began = time.perf_counter()
    try:
        while len(times) <= LEAST_PRODUCTS or time.perf_counter() - began < LEAST_S:
            start = time.perf_counter()
            torch.mm(left, right, out=out)
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return 2 * SIDE**3 / min(times) / cores
