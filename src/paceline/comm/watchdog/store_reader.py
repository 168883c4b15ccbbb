"""Read the statuses of all ranks from the store."""

from __future__ import annotations

from paceline.comm.stores.signed import SignedStore
from paceline.comm.watchdog.reporter import status_key
from paceline.comm.watchdog.status import RankStatus, decode


class StatusReader:
    """Reader of the statuses of some ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._newest: dict[int, RankStatus] = {}

    def read(self, store: SignedStore) -> dict[int, RankStatus]:
        """Return the newest status of each rank that has reported one."""
        for rank in range(self._ranks):
            content = store.find(status_key(rank))
            status = None if content is None else decode(content)
            # Without a key, a message may come from anywhere, and an old one may be posted again.
            if status is not None and status.rank == rank and status.beat > self._last_beat(rank):
                self._newest[rank] = status
        return dict(self._newest)

    def _last_beat(self, rank: int) -> int:
        return self._newest[rank].beat if rank in self._newest else -1
