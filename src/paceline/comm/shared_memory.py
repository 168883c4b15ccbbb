"""All-reduce through memory that the ranks of a host share, bucket by bucket; across hosts their leaders form a ring.

Every rank has a row with room for all buckets, and there is one more row for the sums:

    row of rank 0   [ bucket 0 ........ ][ bucket 1 ... ]      written by rank 0
    row of rank 1   [ bucket 0 ........ ][ bucket 1 ... ]      written by rank 1
    sums            [ shard 0 | shard 1 ][ s. 0 | s. 1  ]      shard r written by rank r, read by all

A rank writes a bucket into its row and says that it is ready. When all have, each adds up its own shard of it, over all
rows, and says that it is done. When all are, the sum is there, one copy of it for all ranks, so it cannot differ.

Who may write what, when, without asking:

- Into its own row of the next step: when this step's sums are there. Whoever reads the row is done by then.
- Into the sums of the next step: when all ranks are ready there. A rank that is has computed that step's gradients, so
  its optimiser has read the sums of this one.

To say so is to move a word forward that all of them see (`headway.py`, `futex.py`).
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.group import Comm
from paceline.comm.headway import DONE, LINE_BYTES, READY, SUMMED, Headway, HeadwayThread
from paceline.comm.host_memory import TOKEN_BYTES, share_memory
from paceline.comm.ring import Scratch, ring_all_reduce
from paceline.measure.operations import Operation
from paceline.records.timeline import NO_PEER, Kind

CHUNK_BYTES = 512 * 1024
"""Rows are added up in pieces of this size, so that a sum is still in the cache when the next row comes."""
_NARROW = (torch.float16, torch.bfloat16)
"""In these a sum may be out of range where the mean is not: they are divided before they are added up."""


class SharedBuckets:
    """The buckets of a rank, in memory that it shares with the ranks of its host. Every rank of the run makes one.

    Per step and bucket, in order: fill `rows[b]`, then `ready(b)`; now and then `progress()`, which does what can be
    done without waiting; then `wait(b)`, after which `means[b]` holds the mean over all ranks of the run. It may be
    read until this rank's next `ready`, and must not be written to.
    """

    def __init__(
        self, items: Sequence[int], dtypes: Sequence[torch.dtype], comm: Comm, *, thread: bool = False
    ) -> None:
        self._comm, self._count = comm, len(items)
        self._sizes = [count * dtype.itemsize for count, dtype in zip(items, dtypes, strict=True)]
        ranks = next(len(host) for host in comm.hosts if comm.rank in host)
        assert TOKEN_BYTES <= LINE_BYTES
        start = _up((1 + ranks) * LINE_BYTES, mmap.PAGESIZE)
        row_bytes = _up(sum(_up(size, LINE_BYTES) for size in self._sizes), mmap.PAGESIZE)
        rows = ranks + (ranks > 1)  # Where a rank is alone, its row is the sum.
        shared = share_memory(start + rows * row_bytes, comm)
        self._whole = torch.frombuffer(shared.memory, dtype=torch.uint8)
        table = [list(_row(self._whole[start + row * row_bytes :], self._sizes, dtypes)) for row in range(rows)]
        self.rows, self.means = table[shared.place], table[-1]
        self._divides_first = [dtype in _NARROW or ranks == 1 for dtype in dtypes]
        self._share = torch.tensor(
            1 / comm.world_size, dtype=torch.float64
        )  # A tensor is multiplied by it in half the time.
        self._chunks = [
            list(_chunks([row[b] for row in table[:-1]], table[-1][b], shared.place)) if ranks > 1 else []
            for b in range(self._count)
        ]
        self._headway = Headway(shared, LINE_BYTES, comm.rank, comm.timeout_s)
        self._all_ready, self._all_done = self._headway.all_of(READY), self._headway.all_of(DONE)
        several = len(comm.hosts) > 1
        self._at_end = self._headway.of_leader(SUMMED) if several else self._all_done
        self._ready = self._reduced = self._ended = 0
        """Buckets since the beginning: in this rank's row, its shard added up, the sum there."""
        self._operations: deque[Operation | None] = deque()
        self._log = None if comm.stopwatch is None else comm.stopwatch.operations
        self._reduces_here = not thread
        if thread:
            self._headway.start("paceline-reduce", self._reduce_all)
        if several and shared.place == 0:
            self._headway.start("paceline-lead", self._lead)

    def ready(self, bucket: int) -> None:
        """Says that a bucket is in this rank's row; buckets come in the order of their numbers."""
        assert bucket == self._ready % self._count
        log = self._log
        self._operations.append(None if log is None else log.start(Kind.SHARED_REDUCE, self._sizes[bucket], NO_PEER))
        if self._divides_first[bucket]:
            self.rows[bucket].mul_(self._share)
        self._ready += 1
        self._headway.advance(READY)

    def progress(self) -> None:
        """Does what can be done without waiting."""
        come = self._headway.have_come
        while self._reduces_here and self._reduced < self._ready and come(self._all_ready, self._reduced + 1):
            self._reduce()
        while self._ended < self._ready and come(self._at_end, self._ended + 1):
            self._end()

    def wait(self, bucket: int) -> None:
        """Returns when the sum of a bucket is there."""
        value = self._ready - (self._ready - 1 - bucket) % self._count
        self.progress()
        if self._ended >= value:
            return
        operation = self._operations[0]
        if operation is not None and self._log is not None:
            self._log.waiting(operation)
        while self._reduces_here and self._reduced < self._ready:
            self._headway.wait(self._all_ready, self._reduced + 1)
            self._reduce()
        while self._ended < value:
            self._headway.wait(self._at_end, self._ended + 1)
            self._end()

    @property
    def writes(self) -> int:
        """How often torch has written into this memory on this rank, so far."""
        return self._whole._version

    def close(self) -> None:
        """Ends the threads, tells who waits that this rank has left, and lets go of the memory."""
        self._headway.leave()
        self._chunks, self.rows, self.means = [], [], []
        del self._whole

    def _reduce(self) -> None:
        """Adds up this rank's shard of the next bucket."""
        bucket = self._reduced % self._count
        for chunk in self._chunks[bucket]:
            torch.add(chunk.first, chunk.second, out=chunk.total)
            for other in chunk.others:
                chunk.total.add_(other)
            if not self._divides_first[bucket]:
                chunk.total.mul_(self._share)
        self._reduced += 1
        self._headway.advance(DONE)

    def _end(self) -> None:
        """The next bucket's sum is there."""
        self._ended += 1
        operation = self._operations.popleft()
        if operation is not None and self._log is not None:
            self._log.end(operation)

    def _reduce_all(self, thread: HeadwayThread) -> None:
        """What the thread does that adds up this rank's shards, where it has one."""
        own = self._headway.own(READY)
        while True:
            self._headway.wait(own, self._reduced + 1, thread)
            self._headway.wait(self._all_ready, self._reduced + 1, thread)
            self._reduce()

    def _lead(self, thread: HeadwayThread) -> None:
        """What a leader's thread does: a ring over the leaders for each bucket that its host has added up."""
        leaders, scratch, summed = [host[0] for host in self._comm.hosts], Scratch(), 0
        while True:
            self._headway.wait(self._all_done, summed + 1, thread)
            ring_all_reduce(self.means[summed % self._count], self._comm, leaders, scratch=scratch)
            summed += 1
            self._headway.advance(SUMMED)


class _Chunk(NamedTuple):
    """A piece of this rank's shard, in all rows."""

    first: Tensor
    second: Tensor
    others: tuple[Tensor, ...]
    total: Tensor


def _row(memory: Tensor, sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> Iterator[Tensor]:
    """The buckets of a row, each from a line of the cache of its own on."""
    offset = 0
    for size, dtype in zip(sizes, dtypes, strict=True):
        yield memory[offset : offset + size].view(dtype)
        offset += _up(size, LINE_BYTES)


def _chunks(rows: Sequence[Tensor], total: Tensor, place: int) -> Iterator[_Chunk]:
    """The shard of a bucket that a rank adds up: whole lines of the cache, as even as that allows."""
    line = LINE_BYTES // total.element_size()
    each = _up(math.ceil(len(total) / len(rows)), line)
    most = CHUNK_BYTES // total.element_size()
    end = min(len(total), (place + 1) * each)
    for start in range(place * each, end, most):
        first, second, *others = [row[start : min(end, start + most)] for row in rows]
        yield _Chunk(first, second, tuple(others), total[start : min(end, start + most)])


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
