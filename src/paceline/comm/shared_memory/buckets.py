"""All-reduce through memory that the ranks of a host share, bucket by bucket; across hosts their leaders form a ring.

Every rank has a row with room for all buckets, and there is one more row for the means:

    row of rank 0   [ bucket 0 ........ ][ bucket 1 ... ]      written by rank 0
    row of rank 1   [ bucket 0 ........ ][ bucket 1 ... ]      written by rank 1
    means           [ shard 0 | shard 1 ][ s. 0 | s. 1  ]      shard r written by rank r, read by all

A rank writes a bucket into its row and says that it is ready. When all have, each adds up its own shard of it, over all
rows, and says that it is done. When all are, the mean is there, one copy of it for all ranks, so it cannot differ. To
say so is to move a word forward that all of them see (`headway.py`, `futex.py`).

With several hosts the leader of each, its first rank, has a thread that takes the host's sums around a ring of the
leaders, one after the other, and says when one is there; for that everyone waits. (To have every rank add up small
buckets as a whole, and wait once instead of twice, was tried: it gains nothing.)

Who may write what, when, without asking:

- Into the means of the next step: when all ranks are ready there. A rank that is has computed that step's gradients, so
  its optimiser has read the means of this one.
- Into its own row of the next step: when this step's mean is there. Whoever reads the row is done by then.
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.all_reduce.ring import Scratch, ring_all_reduce
from paceline.comm.group import Comm
from paceline.comm.shared_memory.host_memory import TOKEN_BYTES, share_memory
from paceline.comm.shared_memory.progress_counters import (
    DONE,
    LINE_BYTES,
    READY,
    SUMMED,
    ProgressCounters,
    ProgressThread,
)
from paceline.measure.operations import ActiveOperation
from paceline.records.timeline import NO_PEER, RowKind

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
        ranks = next(len(host) for host in comm.hosts if comm.rank in host)
        sizes = [count * dtype.itemsize for count, dtype in zip(items, dtypes, strict=True)]
        assert TOKEN_BYTES <= LINE_BYTES
        start = _up((1 + ranks) * LINE_BYTES, mmap.PAGESIZE)
        row_bytes = _up(sum(_up(size, LINE_BYTES) for size in sizes), mmap.PAGESIZE)
        rows = ranks + (ranks > 1)  # Where a rank is alone, its row is the mean.
        shared = share_memory(start + rows * row_bytes, comm)
        self._whole = torch.frombuffer(shared.memory, dtype=torch.uint8)
        self._progress = ProgressCounters(shared, LINE_BYTES, comm.rank, comm.timeout_s)
        self._all_ready, self._all_done = self._progress.all_of(READY), self._progress.all_of(DONE)
        self._at_end = self._progress.of_leader(SUMMED) if len(comm.hosts) > 1 else self._all_done
        table = [list(_row(self._whole[start + row * row_bytes :], sizes, dtypes)) for row in range(rows)]
        self.rows, self.means = table[shared.place], table[-1]
        self._buckets = [_bucket([row[b] for row in table], shared.place) for b in range(self._count)]
        self._share = torch.tensor(1 / comm.world_size, dtype=torch.float64)  # Twice as fast a factor as a number is.
        self._ready = self._reduced = self._ended = 0
        """Buckets since the beginning: in this rank's row, added up as far as this rank does, the mean there."""
        self._operations: deque[ActiveOperation | None] = deque()
        self._log = None if comm.stopwatch is None else comm.stopwatch.operations
        self._reduces_here = not thread
        if thread:
            self._progress.start("paceline-reduce", self._reduce_all)
        if len(comm.hosts) > 1 and shared.place == 0:
            self._progress.start("paceline-lead", self._lead)

    def ready(self, bucket: int) -> None:
        """Says that a bucket is in this rank's row; buckets come in the order of their numbers."""
        assert bucket == self._ready % self._count
        log, own = self._log, self._buckets[bucket]
        self._operations.append(None if log is None else log.start(RowKind.SHARED_REDUCE, own.bytes, NO_PEER))
        if own.divides_first:
            self.rows[bucket].mul_(self._share)
        self._ready += 1
        self._progress.advance(READY)

    def progress(self) -> None:
        """Does what can be done without waiting."""
        come = self._progress.have_come
        while self._reduces_here and self._reduced < self._ready and come(self._all_ready, self._reduced + 1):
            self._reduce()
        while self._ended < self._ready and come(self._at_end, self._ended + 1):
            self._end()

    def wait(self, bucket: int) -> None:
        """Returns when the mean of a bucket is there."""
        value = self._ready - (self._ready - 1 - bucket) % self._count
        self.progress()
        if self._ended >= value:
            return
        operation = self._operations[0]
        if operation is not None and self._log is not None:
            self._log.waiting(operation)
        while self._reduces_here and self._reduced < self._ready:
            self._progress.wait(self._all_ready, self._reduced + 1)
            self._reduce()
        while self._ended < value:
            self._progress.wait(self._at_end, self._ended + 1)
            self._end()

    def keeps(self, bucket: int) -> bool:
        """Whether this rank's row stays as it was filled, until the step's end."""
        return not self._buckets[bucket].divides_first

    @property
    def writes(self) -> int:
        """How often torch has written into the shared memory on this rank, so far."""
        return self._whole._version

    def close(self) -> None:
        """Ends the threads, tells who waits that this rank has left, and lets go of the memory."""
        self._progress.leave()
        self._buckets, self.rows, self.means = [], [], []
        del self._whole

    def _reduce(self) -> None:
        """Adds up this rank's part of the next bucket."""
        bucket = self._buckets[self._reduced % self._count]
        for chunk in bucket.chunks:
            torch.add(chunk.first, chunk.second, out=chunk.total)
            for other in chunk.others:
                chunk.total.add_(other)
            if not bucket.divides_first:
                chunk.total.mul_(self._share)
        self._reduced += 1
        self._progress.advance(DONE)

    def _end(self) -> None:
        """The next bucket's mean is there."""
        self._ended += 1
        operation = self._operations.popleft()
        if operation is not None and self._log is not None:
            self._log.end(operation)

    def _reduce_all(self, thread: ProgressThread) -> None:
        """What the thread does that adds up in place of the computing one, where there is one."""
        own = self._progress.own(READY)
        while True:
            self._progress.wait(own, self._reduced + 1, thread)
            self._progress.wait(self._all_ready, self._reduced + 1, thread)
            self._reduce()

    def _lead(self, thread: ProgressThread) -> None:
        """What a leader's thread does: a ring over the leaders for each bucket that its host has added up."""
        leaders, scratch, summed = [host[0] for host in self._comm.hosts], Scratch(), 0
        while True:
            self._progress.wait(self._all_done, summed + 1, thread)
            ring_all_reduce(self.means[summed % self._count], self._comm, leaders, scratch=scratch)
            summed += 1
            self._progress.advance(SUMMED)


class _Chunk(NamedTuple):
    """A piece of this rank's shard, in all rows."""

    first: Tensor
    second: Tensor
    others: tuple[Tensor, ...]
    total: Tensor


class _Bucket(NamedTuple):
    """What a rank does with a bucket."""

    bytes: int
    chunks: tuple[_Chunk, ...]
    """What it adds up; nothing where it is alone on its host."""
    divides_first: bool
    """Whether gradients are divided by the number of ranks before they are added up, not after."""


def _row(memory: Tensor, sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> Iterator[Tensor]:
    """The buckets of a row, each from a line of the cache of its own on."""
    offset = 0
    for size, dtype in zip(sizes, dtypes, strict=True):
        yield memory[offset : offset + size].view(dtype)
        offset += _up(size, LINE_BYTES)


def _bucket(rows: Sequence[Tensor], place: int) -> _Bucket:
    """What a rank does with a bucket, given its rows; the last is the mean's."""
    *own, mean = rows
    chunks = tuple(_chunks(own, mean, place)) if own else ()
    return _Bucket(mean.nbytes, chunks, divides_first=mean.dtype in _NARROW or not own)


def _chunks(rows: Sequence[Tensor], mean: Tensor, place: int) -> Iterator[_Chunk]:
    """The shard of a bucket that a rank adds up: whole lines of the cache, as even as that allows, in pieces of it."""
    line, most = (size // mean.element_size() for size in (LINE_BYTES, CHUNK_BYTES))
    each = _up(math.ceil(len(mean) / len(rows)), line)
    last = min(len(mean), (place + 1) * each)
    for start in range(place * each, last, most):
        end = min(last, start + most)
        first, second, *others = [row[start:end] for row in rows]
        yield _Chunk(first, second, tuple(others), mean[start:end])


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
