"""Measure the offsets between the clocks of the ranks, so that all timelines can be drawn on rank 0's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from paceline.comm.group import Comm
from paceline.comm.messages.json_messages import gather_typed
from paceline.measure.host import clock_id

EXCHANGES = 10
"""Round trips per host. Only the fastest counts: a delayed message says little about the other clock."""

ReadClock = Callable[[], float]


class ClockOffset(NamedTuple):
    """Seconds that a rank's clock is ahead of rank 0's."""

    offset_s: float
    """Seconds to subtract from the rank's time to get rank 0's."""
    error_s: float
    """Largest possible error: half of the fastest round trip, because one direction may have taken all of it."""


def clock_offsets(comm: Comm, now: ReadClock = time.perf_counter, *, clock: str | None = None) -> list[float]:
    """Return, on every rank, the seconds to subtract from each rank's clock to get rank 0's.

    The offset is exactly 0 for ranks that read the same clock as rank 0. By default these are the ranks on its host;
    `clock` overrides the name by which ranks compare their clocks.
    """
    return [offset.offset_s for offset in measure_offsets(comm, now, clock=clock)]


def measure_offsets(comm: Comm, now: ReadClock = time.perf_counter, *, clock: str | None = None) -> list[ClockOffset]:
    """Return each rank's clock offset and its error. All ranks call this; it takes `EXCHANGES` round trips per host."""
    clocks = gather_typed(clock or clock_id(), str, comm.control)
    offsets = {clocks[0]: ClockOffset(0.0, 0.0)}
    for rank, name in enumerate(clocks):
        if name in offsets:
            continue
        offsets[name] = ClockOffset(0.0, 0.0)  # Only the first rank of a host is measured.
        if comm.rank == 0:
            offsets[name] = _measure_offset(comm, rank, now)
        elif comm.rank == rank:
            _send_clock(comm, now)
    found = torch.tensor([offsets[name] for name in clocks], dtype=torch.float64)
    dist.broadcast(found, group_src=0, group=comm.control.group)
    return [ClockOffset(*pair) for pair in found.tolist()]


def _measure_offset(comm: Comm, rank: int, now: ReadClock) -> ClockOffset:
    """Measure, on rank 0, the offset of another rank's clock, assumed to be read halfway through the round trip."""
    found: list[ClockOffset] = []
    remote_s = torch.zeros((), dtype=torch.float64)
    for _ in range(EXCHANGES):
        sent_s = now()
        dist.send(remote_s, group_dst=rank, group=comm.control.group)
        dist.recv(remote_s, group_src=rank, group=comm.control.group)
        received_s = now()
        found.append(ClockOffset(float(remote_s) - (sent_s + received_s) / 2, (received_s - sent_s) / 2))
    return min(found, key=lambda offset: offset.error_s)


def _send_clock(comm: Comm, now: ReadClock) -> None:
    """Reply to each request of rank 0 with this rank's time."""
    request = torch.zeros((), dtype=torch.float64)
    for _ in range(EXCHANGES):
        dist.recv(request, group_src=0, group=comm.control.group)
        dist.send(torch.tensor(now(), dtype=torch.float64), group_dst=0, group=comm.control.group)
