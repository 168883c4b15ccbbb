"""All-reduce through memory that the ranks of a host share, bucket by bucket; the leaders of the hosts form a ring.

Every rank has a row with room for all buckets, and one more row holds the means:

    row of rank 0   [ bucket 0 ........ ][ bucket 1 ... ]      written by rank 0
    row of rank 1   [ bucket 0 ........ ][ bucket 1 ... ]      written by rank 1
    means           [ shard 0 | shard 1 ][ s. 0 | s. 1  ]      shard r written by rank r, read by all

A rank writes a bucket into its row and increments its READY counter. When all ranks have done so, each rank sums its
own shard of the bucket over all rows and increments its REDUCED counter. When all ranks have done that, the mean is
complete. All ranks read the same copy of it, so replicas cannot diverge. The counters are in `progress_counters.py`.

With several hosts, the leader of each (its first rank) has a thread that all-reduces the host's sums over a ring of the
leaders, one bucket after the other, and increments its SUMMED counter, which all ranks of the host wait for. (Letting
every rank sum small buckets as a whole, to wait once instead of twice, was tried and gained nothing.)

No locks are needed, because each write is safe at a known time:

- The means of the next step may be written when all ranks are READY in that step. Such a rank has computed that step's
  gradients, so it has already copied the means of this step out.
- A rank's own row of the next step may be written when this step's mean is complete. All ranks have read the row by
  then.
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.all_reduce import Scratch, all_reduce
from paceline.comm.group import Comm
from paceline.comm.shared_memory.host_memory import TOKEN_BYTES, share_memory
from paceline.comm.shared_memory.progress_counters import (
    LINE_BYTES,
    READY,
    REDUCED,
    SUMMED,
    ProgressCounters,
    ProgressThread,
)
from paceline.measure.operations import ActiveOperation
from paceline.plans.ring import ALGORITHM as RING
from paceline.records.timeline import NO_PEER, RowKind

CHUNK_BYTES = 512 * 1024
"""Rows are summed in chunks of this size, so that a sum is still in the cache when the next row is added."""
_LOW_PRECISION = (torch.float16, torch.bfloat16)
"""Dtypes whose sum may overflow although the mean does not: rows are divided before they are summed."""


class SharedBuckets:
    """Buckets of a rank, in memory that it shares with the ranks of its host. Every rank of the run creates one.

    In each step, in order of buckets: fill `rows[b]`, then call `mark_ready(b)`; call `progress()` from time to time,
    which does all work that needs no waiting; then call `wait(b)`. After that `means[b]` holds the mean over all ranks
    of the run. It is valid until this rank's next `mark_ready`, and must not be written to.
    """

    def __init__(
        self, items: Sequence[int], dtypes: Sequence[torch.dtype], comm: Comm, *, thread: bool = False
    ) -> None:
        self._count = len(items)
        ranks = next(len(host) for host in comm.hosts if comm.rank in host)
        sizes = [count * dtype.itemsize for count, dtype in zip(items, dtypes, strict=True)]
        assert TOKEN_BYTES <= LINE_BYTES
        start = _round_up((1 + ranks) * LINE_BYTES, mmap.PAGESIZE)
        row_bytes = _round_up(sum(_round_up(size, LINE_BYTES) for size in sizes), mmap.PAGESIZE)
        rows = ranks + (ranks > 1)  # The row of a rank that is alone on its host is also the mean.
        shared = share_memory(start + rows * row_bytes, comm)
        self._whole = torch.frombuffer(shared.memory, dtype=torch.uint8)
        self._progress = ProgressCounters(shared, LINE_BYTES, comm.rank, comm.timeout_s)
        self._all_ready = self._progress.counters_of_all(READY)
        self._all_reduced = self._progress.counters_of_all(REDUCED)
        self._completed = self._progress.counter_of_leader(SUMMED) if len(comm.hosts) > 1 else self._all_reduced
        table = [list(_row(self._whole[start + row * row_bytes :], sizes, dtypes)) for row in range(rows)]
        self.rows, self.means = table[shared.position], table[-1]
        self._buckets = [_bucket([row[b] for row in table], shared.position) for b in range(self._count)]
        # Multiplying by a tensor is twice as fast as multiplying by a Python number.
        self._share = torch.tensor(1 / comm.world_size, dtype=torch.float64)
        self._ready = self._reduced = self._ended = 0
        """Buckets since the start: written to this rank's row, reduced by this rank, and with a complete mean."""
        self._operations: deque[ActiveOperation | None] = deque()
        self._log = None if comm.stopwatch is None else comm.stopwatch.operations
        if self._log is not None:
            self._log.has_async_operations = True  # Backward waits for them after its last gradient.
        self._reduces_here = not thread
        between_hosts = comm.through_main_memory() if len(comm.hosts) > 1 else None
        if thread:
            self._progress.start_thread("paceline-reduce", self._reduce_all)
        if between_hosts is not None and shared.position == 0:
            self._progress.start_thread("paceline-lead", lambda thread: self._lead(thread, between_hosts))

    def mark_ready(self, bucket: int) -> None:
        """Mark a bucket of this rank's row as complete; called in the order of bucket numbers."""
        assert bucket == self._ready % self._count
        log, own = self._log, self._buckets[bucket]
        self._operations.append(None if log is None else log.start(RowKind.SHARED_REDUCE, own.bytes, NO_PEER))
        if own.divides_first:
            self.rows[bucket].mul_(self._share)
        self._ready += 1
        self._progress.increment(READY)

    def progress(self) -> None:
        """Do all work that needs no waiting."""
        have_reached = self._progress.have_reached
        while self._reduces_here and self._reduced < self._ready and have_reached(self._all_ready, self._reduced + 1):
            self._reduce()
        while self._ended < self._ready and have_reached(self._completed, self._ended + 1):
            self._end()

    def wait(self, bucket: int) -> None:
        """Wait until the mean of a bucket is complete."""
        value = self._ready - (self._ready - 1 - bucket) % self._count
        self.progress()
        if self._ended >= value:
            return
        operation = self._operations[0]
        if operation is not None and self._log is not None:
            self._log.mark_waiting(operation)
        while self._reduces_here and self._reduced < self._ready:
            self._progress.wait(self._all_ready, self._reduced + 1)
            self._reduce()
        while self._ended < value:
            self._progress.wait(self._completed, self._ended + 1)
            self._end()

    def keeps_row(self, bucket: int) -> bool:
        """Return whether this rank's row keeps the values written to it until the end of the step."""
        return not self._buckets[bucket].divides_first

    def close(self) -> None:
        """Stop the threads, mark this rank as having left, and release the memory."""
        self._progress.close()
        self._buckets, self.rows, self.means = [], [], []
        del self._whole

    def _reduce(self) -> None:
        """Compute the mean of this rank's shard of the next bucket."""
        bucket = self._buckets[self._reduced % self._count]
        for chunk in bucket.chunks:
            torch.add(chunk.first, chunk.second, out=chunk.total)
            for other in chunk.others:
                chunk.total.add_(other)
            if not bucket.divides_first:
                chunk.total.mul_(self._share)
        self._reduced += 1
        self._progress.increment(REDUCED)

    def _end(self) -> None:
        """Record that the next bucket's mean is complete."""
        self._ended += 1
        operation = self._operations.popleft()
        if operation is not None and self._log is not None:
            self._log.end(operation)

    def _reduce_all(self, thread: ProgressThread) -> None:
        """Run the reduction thread, which replaces the compute thread if the strategy uses one."""
        own = self._progress.own_counter(READY)
        while True:
            self._progress.wait(own, self._reduced + 1, thread)
            self._progress.wait(self._all_ready, self._reduced + 1, thread)
            self._reduce()

    def _lead(self, thread: ProgressThread, comm: Comm) -> None:
        """Run the leader's thread: a ring all-reduce over the leaders for each bucket that this host has reduced."""
        leaders, scratch, summed = [host[0] for host in comm.hosts], Scratch(), 0
        while True:
            self._progress.wait(self._all_reduced, summed + 1, thread)
            all_reduce(self.means[summed % self._count], comm, RING, leaders, scratch=scratch)
            summed += 1
            self._progress.increment(SUMMED)


class _Chunk(NamedTuple):
    """A part of this rank's shard, in all rows."""

    first: Tensor
    second: Tensor
    others: tuple[Tensor, ...]
    total: Tensor


class _Bucket(NamedTuple):
    """Reduction of a bucket on one rank."""

    bytes: int
    chunks: tuple[_Chunk, ...]
    """Parts that this rank sums; empty if it is alone on its host."""
    divides_first: bool
    """Whether gradients are divided by the number of ranks before they are summed, instead of after."""


def _row(memory: Tensor, sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> Iterator[Tensor]:
    """Yield the buckets of a row, each aligned to `LINE_BYTES`."""
    offset = 0
    for size, dtype in zip(sizes, dtypes, strict=True):
        yield memory[offset : offset + size].view(dtype)
        offset += _round_up(size, LINE_BYTES)


def _bucket(rows: Sequence[Tensor], position: int) -> _Bucket:
    """Return the reduction of a bucket for the rank at a position; the last of `rows` holds the mean."""
    *own, mean = rows
    chunks = tuple(_chunks(own, mean, position)) if own else ()
    return _Bucket(mean.nbytes, chunks, divides_first=mean.dtype in _LOW_PRECISION or not own)


def _chunks(rows: Sequence[Tensor], mean: Tensor, position: int) -> Iterator[_Chunk]:
    """Yield the chunks of a rank's shard. Shards are whole multiples of `LINE_BYTES`, as even as that allows."""
    line, most = (size // mean.element_size() for size in (LINE_BYTES, CHUNK_BYTES))
    each = _round_up(math.ceil(len(mean) / len(rows)), line)
    last = min(len(mean), (position + 1) * each)
    for start in range(position * each, last, most):
        end = min(last, start + most)
        first, second, *others = [row[start:end] for row in rows]
        yield _Chunk(first, second, tuple(others), mean[start:end])


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
