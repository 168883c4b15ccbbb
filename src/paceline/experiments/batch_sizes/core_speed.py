"""Measure the FLOP per second of a core in a matrix product, which model FLOP utilisation on a CPU is relative to."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from paceline.config import Precision
from paceline.measure.cores import usable_cores
from paceline.measure.other_programs import OtherProgramsProbe
from paceline.training.precision import AUTOCAST_TYPES, storage_dtype

SIDE = 1024
"""Rows and columns of the matrices: large enough that reading them takes little of the time."""
LEAST_S = 0.5
LEAST_PRODUCTS = 3


class CoreSpeed(NamedTuple):
    """Speed of a core, and the load under which it was measured."""

    flop_per_s: float
    """FLOP per second of the fastest product on all usable cores of this host, ÷ the cores."""
    other_load: float | None
    """Cores that other programs used meanwhile; None if the time was too short to know."""


def measure_core_speed(precision: Precision) -> CoreSpeed:
    """Return the speed of a core in products on all usable cores of this host.

    The fastest product of several counts, since other programs can only slow it down. Where they use the cores all the
    time, even the fastest is too slow, so their load is measured, too.
    """
    cores = max(1, int(usable_cores()))
    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    dtype = AUTOCAST_TYPES.get(precision, storage_dtype(precision))
    left, right, out = (torch.full((SIDE, SIDE), 1 / SIDE, dtype=dtype) for _ in range(3))
    times: list[float] = []
    others = OtherProgramsProbe()
    try:
        while len(times) <= LEAST_PRODUCTS or others.elapsed_s < LEAST_S:
            start = time.perf_counter()
            torch.mm(left, right, out=out)
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return CoreSpeed(2 * SIDE**3 / min(times) / cores, others.used_cores())
