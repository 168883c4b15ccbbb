"""Measure the FLOP per second of a core in a matrix product, which model FLOP utilisation on a CPU is relative to."""

from __future__ import annotations

from typing import NamedTuple

import torch

from paceline.config import Precision
from paceline.measure.cores import usable_cores
from paceline.measure.matrix_product import FLOP, fastest_products_s
from paceline.measure.other_programs import OtherProgramsProbe
from paceline.training.precision import AUTOCAST_TYPES, storage_dtype

LEAST_S = 0.5


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
    others = OtherProgramsProbe()
    try:
        (product_s,) = fastest_products_s([dtype], LEAST_S)
    finally:
        torch.set_num_threads(before)
    return CoreSpeed(FLOP / product_s / cores, others.used_cores())
