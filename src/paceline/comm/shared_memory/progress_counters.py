"""Progress counters of the ranks of a host, in shared memory, and waiting until they reach a value.

A waiting thread first spins for a short time if each rank has its own core. It then sleeps, and wakes up regularly
to check whether the rank that it waits for is still running.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from paceline.comm.shared_memory.futex import WORD_BYTES, FutexWords
from paceline.comm.shared_memory.host_memory import HostMemory
from paceline.errors import RankError
from paceline.formatting import whole
from paceline.measure.cores import usable_cores

LINE_BYTES = 128
"""Two cache lines: processors often fetch a line together with its neighbour. The counters of a rank have these to
themselves, so that reading one rank's counters never slows down another rank's writes (false sharing)."""
SPIN_S = 200e-6
"""Spinning time: about the difference between ranks that compute the same; a wake-up costs a tenth of it."""
PEER_CHECK_S = 0.05
"""Longest sleep between two checks whether the awaited rank is still running."""

READY, REDUCED, SUMMED = range(3)
"""Counters of a rank: buckets written to its row, buckets whose shard it has reduced, and, on the leader, buckets that
have been summed over all hosts."""
_LEFT = 3


class ProgressCounters:
    """Counters of all ranks of a host. A counter is only incremented, and only by its own rank.

    Methods that look at counters take their indices, which `counters_of_all`, `counter_of_leader` and `own_counter`
    return as lists.
    """

    def __init__(self, shared: HostMemory, offset: int, rank: int, timeout_s: float) -> None:
        self._words = FutexWords(shared.memory, offset, len(shared.peers) * LINE_BYTES // WORD_BYTES)
        self._peers, self._position = shared.peers, shared.position
        self._rank, self._timeout_s = rank, timeout_s
        ranks_on_cores = int(os.environ.get("PACELINE_SHARING", len(shared.peers)))
        self._spins = usable_cores() >= ranks_on_cores
        self.threads: list[ProgressThread] = []
        """Threads of this rank that other ranks wait for. If one fails, the compute thread raises its error."""

    def increment(self, counter: int) -> None:
        """Increment a counter of this rank. Ranks that see the new value also see all earlier writes of this rank."""
        self._words.add(_index(self._position, counter))

    def counters_of_all(self, counter: int) -> list[int]:
        """Return the indices of a counter of all ranks."""
        return [_index(position, counter) for position in range(len(self._peers))]

    def counter_of_leader(self, counter: int) -> list[int]:
        """Return the index of a counter of the host's first rank."""
        return [_index(0, counter)]

    def own_counter(self, counter: int) -> list[int]:
        """Return the index of a counter of this rank."""
        return [_index(self._position, counter)]

    def have_reached(self, indices: Sequence[int], value: int) -> bool:
        """Return whether all these counters have reached a value."""
        for index in indices:
            if not self._words.has_reached(index, value):
                return False
        for index in indices:
            self._words.acquire(index)
        return True

    def wait(self, indices: Sequence[int], value: int, thread: ProgressThread | None = None) -> None:
        """Wait until all these counters have reached a value; raise a `RankError` if they cannot or time runs out.

        A thread other than the compute thread passes itself as `thread`. It does not spin and has no time-out.
        """
        if thread is None and self._spins:
            until_s = time.perf_counter() + SPIN_S
            while time.perf_counter() < until_s:
                if self.have_reached(indices, value):
                    return
        for index in indices:
            self._sleep_until(index, value, thread)

    def start_thread(self, name: str, work: Callable[[ProgressThread], None]) -> None:
        """Run `work` in a thread until `close`."""
        self.threads.append(ProgressThread(name, work))

    def close(self) -> None:
        """Stop the threads, mark this rank as having left, and release the memory."""
        for thread in self.threads:
            thread.stops = True
        for counter in (READY, REDUCED):  # Wake the threads: at the end of a step they wait for one of these counters.
            self._words.add(_index(self._position, counter), by=0)
        for thread in self.threads:
            thread.join()
        self.threads.clear()  # Breaks a reference cycle that would keep the memory alive.
        self.increment(_LEFT)
        self._words.release()

    def _sleep_until(self, index: int, value: int, thread: ProgressThread | None) -> None:
        since_s = time.monotonic()
        while True:
            now = self._words[index]
            if self._words.has_reached(index, value):
                break
            if thread is not None and thread.stops:
                raise ThreadStopped
            self._words.wait(index, now, PEER_CHECK_S)
            if not self._words.has_reached(index, value):
                self._check_failures(index, value, time.monotonic() - since_s, thread)
        self._words.acquire(index)

    def _check_failures(self, index: int, value: int, waited_s: float, thread: ProgressThread | None) -> None:
        """Raise if a thread of this rank failed, if the awaited rank has ended, or if the time-out has passed."""
        for failure in (own.failure for own in self.threads if own is not thread):
            if failure is not None:
                raise failure
        position = index * WORD_BYTES // LINE_BYTES
        peer = self._peers[position]
        has_left = self.have_reached([_index(position, _LEFT)], 1) or not peer.is_alive
        # Check the counter again: the peer may have reached the value just before it left.
        if has_left and not self.have_reached([index], value):
            raise _peer_lost(f"rank {peer.rank} ended while rank {self._rank} waited for its gradients.")
        if thread is None and waited_s > self._timeout_s:
            raise _peer_lost(f"rank {self._rank} waited {whole(waited_s)} s for the gradients of rank {peer.rank}.")


class ThreadStopped(Exception):
    """Raised in a `ProgressThread` to end it."""


class ProgressThread:
    """A background thread that runs `work(thread)` until `stops` is set or it fails."""

    def __init__(self, name: str, work: Callable[[ProgressThread], None]) -> None:
        self.stops = False
        self.failure: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended; at most 1 s, since it may be blocked in a network operation."""
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        try:
            self._work(self)
        except ThreadStopped:
            pass
        except Exception as error:  # Raised by the compute thread when it waits.
            self.failure = error


def _peer_lost(message: str) -> RankError:
    hint = "see the log of that rank for the reason; if it is only slow, increase --timeout"
    return RankError(message, hint=hint, peer_lost=True)


def _index(position: int, counter: int) -> int:
    return position * (LINE_BYTES // WORD_BYTES) + counter
