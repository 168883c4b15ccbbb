"""Starts the clocks of a run's ranks at one moment, so that their times can be laid side by side."""

from __future__ import annotations

import time
from typing import Any

import torch

from paceline.comm import Comm
from paceline.comm.clocks import clock_offsets


def start_together(comm: Comm) -> None:
    """Begins the run, on every rank's stopwatch, at the same moment of rank 0's clock."""
    assert comm.stopwatch is not None
    offset_s = clock_offsets(comm, time.perf_counter)[comm.rank]
    moment_s = float(comm.gather(torch.tensor([time.perf_counter()], dtype=torch.float64))[0])
    comm.stopwatch.clock.start(moment_s + offset_s)


def drift(comm: Comm) -> dict[str, Any]:
    """How far the ranks' clocks have come apart since, for the record: readers set their times right by it."""
    assert comm.stopwatch is not None
    now = comm.stopwatch.clock.now
    return {"measured_at_s": now(), "drift_s": clock_offsets(comm, now)}
