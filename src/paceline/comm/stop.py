"""Stop of a job on request of its launcher: ranks agree on a step, through the job's store.

    launcher   sets REQUESTED
    each rank  looks for REQUESTED from time to time; once it has seen it, it counts itself in SEEN and looks for STEP
               after every step
    rank 0     announces STEP, some steps ahead, when all ranks have seen the request

Until a stop is requested, a step costs a comparison of times. A check of the store takes 40 µs, and far more on busy
cores, so it is not made after every step.
"""

from __future__ import annotations

import time

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

POLL_S = 0.25
"""Seconds between two looks for the request."""
_PREFIX = "paceline-stop"
_REQUESTED, _WATCHING, _SEEN, _STEP = "requested", "watching", "seen", "step"


class StopRequest:
    """A rank's view of the request to stop."""

    def __init__(self, store: Store) -> None:
        """`store` is any view of the job's store."""
        self._store = _keys(store)
        self._look_at_s = 0.0
        self._watching = self._seen = False
        self._step: int | None = None

    def requested(self) -> bool:
        """Return whether the launcher has asked to stop, and every rank that calls `announced` knows it."""
        return self._look() and self._store.add(_SEEN, 0) >= self._store.add(_WATCHING, 0)

    def announce(self, step: int) -> None:
        """Announce the step at which all ranks stop; when this returns, every later call of `announced` has it."""
        self._store.set(_STEP, str(step))
        self._store.get(_STEP)  # `set` returns before the store has the value.
        self._step = step

    def announced(self) -> int | None:
        """Return the step at which all ranks stop; None while none is announced. Each rank calls it at every step."""
        if self._step is None and self._is_counted() and self._store.check([_STEP]):
            self._step = int(self._store.get(_STEP))
        return self._step

    def _is_counted(self) -> bool:
        """Return whether this rank has seen the request, and counted itself."""
        if not self._watching:  # Before the first look: rank 0 then waits for this rank, or this look finds the key.
            self._watching = True
            self._store.add(_WATCHING, 1)
            if self._seen:
                self._store.add(_SEEN, 1)
        return self._look()

    def _look(self) -> bool:
        now = time.monotonic()
        if not self._seen and now >= self._look_at_s:
            self._look_at_s = now + POLL_S
            self._seen = bool(self._store.check([_REQUESTED]))
            if self._seen and self._watching:
                self._store.add(_SEEN, 1)
        return self._seen


def request_stop(store: Store) -> None:
    """Ask the ranks of a job to stop; `store` is the job's store, as the launcher opened it."""
    _keys(store).set(_REQUESTED, "yes")


def _keys(store: Store) -> PrefixStore:
    """Return the part of a store for these keys; ranks see the store through prefixes, the launcher does not."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return PrefixStore(_PREFIX, store)
