"""How far the ranks' clocks are apart, so that all of them can be drawn on rank 0's."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from paceline.comm.group import Comm
from paceline.measure.host import clock_id

EXCHANGES = 10
"""The quickest of them counts: a message that was held up on its way says little about the other clock."""

ReadClock = Callable[[], float]


class ClockOffset(NamedTuple):
    """How far a rank's clock is ahead of rank 0's, in seconds."""

    offset_s: float
    """To subtract from the rank's own time to get rank 0's."""
    error_s: float
    """It may be wrong by this much: half of the quickest round trip, all of which one direction may have taken."""


def clock_offsets(comm: Comm, now: ReadClock = time.perf_counter, *, clock: str | None = None) -> list[float]:
    """Seconds to subtract from each rank's own clock to get rank 0's; the whole list, on every rank.

    Exactly 0 for ranks that read the same clock as rank 0: those of its host, unless `clock` names it otherwise.
    """
    return [offset.offset_s for offset in measure_offsets(comm, now, clock=clock)]


def measure_offsets(comm: Comm, now: ReadClock = time.perf_counter, *, clock: str | None = None) -> list[ClockOffset]:
    """As `clock_offsets`, each with its error. Called on all ranks at once; takes `EXCHANGES` round trips per host."""
    clocks = _clocks(comm, clock or clock_id())
    offsets = {clocks[0]: ClockOffset(0.0, 0.0)}
    for rank, name in enumerate(clocks):
        if name in offsets:
            continue
        offsets[name] = ClockOffset(0.0, 0.0)  # The first rank of a host speaks for all of it.
        if comm.rank == 0:
            offsets[name] = _ask(comm, rank, now)
        elif comm.rank == rank:
            _answer(comm, now)
    found = torch.tensor([offsets[name] for name in clocks], dtype=torch.float64)
    dist.broadcast(found, group_src=0, group=comm.control)
    return [ClockOffset(*pair) for pair in found.tolist()]


def _clocks(comm: Comm, clock: str) -> list[bytes]:
    """The name of every rank's clock, as a digest, which has one size."""
    digest = torch.frombuffer(bytearray(hashlib.sha256(clock.encode()).digest()), dtype=torch.uint8)
    return [bytes(name.tolist()) for name in comm.gather(digest)]


def _ask(comm: Comm, rank: int, now: ReadClock) -> ClockOffset:
    """Rank 0's side: the other clock was read halfway through the quickest exchange, give or take half of it."""
    found: list[ClockOffset] = []
    theirs = torch.zeros((), dtype=torch.float64)
    for _ in range(EXCHANGES):
        sent = now()
        dist.send(theirs, group_dst=rank, group=comm.control)
        dist.recv(theirs, group_src=rank, group=comm.control)
        received = now()
        found.append(ClockOffset(float(theirs) - (sent + received) / 2, (received - sent) / 2))
    return min(found, key=lambda offset: offset.error_s)


def _answer(comm: Comm, now: ReadClock) -> None:
    """The other rank's side: says what its clock shows, as soon as it is asked."""
    word = torch.zeros((), dtype=torch.float64)
    for _ in range(EXCHANGES):
        dist.recv(word, group_src=0, group=comm.control)
        dist.send(torch.tensor(now(), dtype=torch.float64), group_dst=0, group=comm.control)
