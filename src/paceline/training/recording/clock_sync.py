"""Start the clocks of all ranks of a run at the same time, so that their timestamps are comparable."""

from __future__ import annotations

import time

import torch

from paceline.comm import Comm
from paceline.comm.clocks import clock_offsets
from paceline.records.summary import ClockDrift


def start_clocks(comm: Comm, elapsed_s: float = 0.0) -> None:
    """Set every rank's stopwatch to `elapsed_s` at the same time on rank 0's clock."""
    assert comm.stopwatch is not None
    offset_s = clock_offsets(comm, time.perf_counter)[comm.rank]
    moment_s = float(comm.control.gather(torch.tensor([time.perf_counter()], dtype=torch.float64))[0])
    comm.stopwatch.clock.set_origin(moment_s + offset_s - elapsed_s)


def measure_drift(comm: Comm) -> ClockDrift:
    """Return how far each rank's clock has drifted since the start; readers of the record correct timestamps by it."""
    assert comm.stopwatch is not None
    now = comm.stopwatch.clock.now
    return ClockDrift(measured_at_s=now(), drift_s=clock_offsets(comm, now))
