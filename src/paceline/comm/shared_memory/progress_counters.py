"""How far each rank of a host has come, in words that all of them see, and waiting until they have come further.

Who has to wait looks at the word for a moment, where the rank has a core to itself, then sleeps, and wakes up now and
then to see whether the rank that it waits for still lives.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from paceline.comm.shared_memory.futex import WORD_BYTES, FutexWords
from paceline.comm.shared_memory.host_memory import HostMemory
from paceline.errors import RankError
from paceline.measure.cores import usable_cores

LINE_BYTES = 128
"""What a processor takes from another at once: a line of its cache, and often the one beside it. A rank's words are
in one of its own, so that nobody is held up who looks at another's."""
SPIN_S = 200e-6
"""About what ranks that compute the same are apart; to be woken up costs a tenth of it."""
LOOK_AROUND_S = 0.05

READY, DONE, SUMMED = range(3)
"""The words of a rank: buckets that it has filled, that it has added up its shard of, that its host has the sums of."""
_LEFT = 3


class ProgressCounters:
    """The words of the ranks of a host. A word is moved by its own rank alone, and only forward."""

    def __init__(self, shared: HostMemory, offset: int, rank: int, timeout_s: float) -> None:
        self._words = FutexWords(shared.memory, offset, len(shared.peers) * LINE_BYTES // WORD_BYTES)
        self._peers, self._place = shared.peers, shared.place
        self._rank, self._timeout_s = rank, timeout_s
        ranks_on_cores = int(os.environ.get("PACELINE_SHARING", len(shared.peers)))
        self._spins = usable_cores() >= ranks_on_cores
        self.threads: list[ProgressThread] = []
        """Those of this rank that others wait for; where one fails, the computing thread tells."""

    def advance(self, which: int) -> None:
        """Moves a word of this rank on by one: what it wrote before can be seen by who sees that."""
        self._words.advance(_index(self._place, which))

    def all_of(self, which: int) -> list[int]:
        """The same word of all ranks."""
        return [_index(place, which) for place in range(len(self._peers))]

    def of_leader(self, which: int) -> list[int]:
        """A word of the first rank of the host."""
        return [_index(0, which)]

    def own(self, which: int) -> list[int]:
        """A word of this rank."""
        return [_index(self._place, which)]

    def have_come(self, words: Sequence[int], value: int) -> bool:
        """Whether all these words have come to a value."""
        for word in words:
            if not self._words.reached(word, value):
                return False
        for word in words:
            self._words.seen(word)
        return True

    def wait(self, words: Sequence[int], value: int, thread: ProgressThread | None = None) -> None:
        """Returns when all these words have come to a value; raises where that will not be.

        A thread other than the computing one says so: it has all the time there is, and does not spin.
        """
        if thread is None and self._spins:
            until_s = time.perf_counter() + SPIN_S
            while time.perf_counter() < until_s:
                if self.have_come(words, value):
                    return
        for word in words:
            self._sleep(word, value, thread)

    def start(self, name: str, work: Callable[[ProgressThread], None]) -> None:
        """Has a thread do something until this rank leaves."""
        self.threads.append(ProgressThread(name, work))

    def leave(self) -> None:
        """Ends the threads, says that this rank will not move its words any more, and lets go of the memory."""
        for thread in self.threads:
            thread.stops = True
        for which in (READY, DONE):  # They wait for a word of some rank; at the end of a step that is this one's too.
            self._words.advance(_index(self._place, which), by=0)
        for thread in self.threads:
            thread.join()
        self.threads.clear()  # They and what they do hold each other, and the memory.
        self.advance(_LEFT)
        self._words.release()

    def _sleep(self, word: int, value: int, thread: ProgressThread | None) -> None:
        since_s = time.monotonic()
        while True:
            now = self._words[word]
            if self._words.reached(word, value):
                break
            if thread is not None and thread.stops:
                raise ThreadStopped
            self._words.sleep(word, now, LOOK_AROUND_S)
            if not self._words.reached(word, value):
                self._look_around(word, value, time.monotonic() - since_s, thread)
        self._words.seen(word)

    def _look_around(self, word: int, value: int, waited_s: float, thread: ProgressThread | None) -> None:
        for failure in (own.failure for own in self.threads if own is not thread):
            if failure is not None:
                raise failure
        place = word * WORD_BYTES // LINE_BYTES
        peer = self._peers[place]
        has_left = self.have_come([_index(place, _LEFT)], 1) or not peer.is_alive
        # Looked at once more after that: it may have come to the value, and left, a moment ago.
        if has_left and not self.have_come([word], value):
            raise _lost(f"rank {peer.rank} ended while rank {self._rank} waited for its gradients.")
        if thread is None and waited_s > self._timeout_s:
            raise _lost(f"rank {self._rank} waited {waited_s:.0f} s for the gradients of rank {peer.rank}.")


class ThreadStopped(Exception):
    """Ends a thread that has nothing to wait for any more."""


class ProgressThread:
    """A thread that goes on as words do: `work(thread)` in the background until `stop`, or until it fails."""

    def __init__(self, name: str, work: Callable[[ProgressThread], None]) -> None:
        self.stops = False
        self.failure: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Returns when it has ended; one that hangs on a wire is not waited for."""
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        try:
            self._work(self)
        except ThreadStopped:
            pass
        except Exception as error:  # Told by the computing thread, when it waits for what will not come.
            self.failure = error


def _lost(message: str) -> RankError:
    return RankError(message, hint="its log says why; --timeout waits longer for one that is late", peer_lost=True)


def _index(place: int, which: int) -> int:
    return place * (LINE_BYTES // WORD_BYTES) + which
