"""Request of the launcher to stop a run: ranks agree on the step at which they stop, through the store of their job.

The store is signed (`comm/stores/signed.py`), so that only the launcher and the ranks can stop a run.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

REQUESTED, STOP_STEP = "stop-requested", "stop-step"
"""Keys in the store of a job: the launcher sets the first, rank 0 the second."""


@dataclass(frozen=True)
class StopRequest:
    """Request to stop, as a rank sees it."""

    store: Store | None
    """Store of the job; None if nobody can ask this run to stop."""

    @property
    def is_possible(self) -> bool:
        """Whether anybody can ask this run to stop."""
        return self.store is not None

    def requested(self) -> bool:
        """Return whether the launcher has asked the run to stop."""
        return self.store is not None and _keys(self.store).check([REQUESTED])

    def announce(self, step: int) -> None:
        """Announce the step at which all ranks stop; called on rank 0.

        It returns when the store has it: the value is read back, because `set` does not wait.
        """
        assert self.store is not None
        keys = _keys(self.store)
        keys.set(STOP_STEP, str(step))
        keys.get(STOP_STEP)

    def announced(self) -> int | None:
        """Return the step at which all ranks stop; None if they do not."""
        if self.store is None or not _keys(self.store).check([STOP_STEP]):
            return None
        return int(_keys(self.store).get(STOP_STEP))


NO_STOP = StopRequest(None)


def request_stop(store: Store) -> None:
    """Ask the ranks of a job to stop; `store` is the store of the job, as its launcher opened it."""
    _keys(store).set(REQUESTED, "yes")


def _keys(store: Store) -> PrefixStore:
    """Return the part of a store for these keys: ranks see the store of their job through prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return PrefixStore("paceline-stop", store)
