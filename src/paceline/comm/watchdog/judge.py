"""Judge of a hang: decides from the statuses that arrive whether any rank still goes on.

A rank goes on if it reports progress, or if it computes, reads or writes. It does not go on while it waits in an
operation for others. So ranks that wait for a busy one are not hung, and nothing is, as long as one rank goes on. An
operation that would soon end by the time-out of its process group is the exception: Gloo would then name nobody.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from paceline.comm.watchdog.reporter import beat_period_s
from paceline.comm.watchdog.status import RankStatus

SILENT_BEATS = 3
"""Statuses that must be missing before a rank counts as silent."""
PAUSE_BEATS = 3
"""Time between two looks at the statuses, in periods, after which this process itself must have been paused."""
GROUP_MARGIN_S = 5.0
"""Seconds before the time-out of a process group in which ranks are reported as hung even if one of them is busy."""


@dataclass
class ObservedRank:
    """Knowledge of the judge about a rank."""

    status: RankStatus | None = None
    beat_s: float = 0.0
    """Time of its last status, on the clock of the judge."""
    progress_s: float = 0.0
    """Time at which it last reported progress."""
    active_s: float = 0.0
    """Time at which it last reported progress, or that it was busy."""


@dataclass(frozen=True)
class Hang:
    """A hang: the last status of every rank, and for how long each has not gone on."""

    statuses: Mapping[int, RankStatus]
    stalled_s: Mapping[int, float]
    """Seconds without progress, by rank."""
    silent_s: Mapping[int, float]
    """Seconds without a status, of the ranks that do not report any more."""
    timeout_s: float
    """Time-out after which it was detected."""


@dataclass
class HangJudge:
    """Judge of the ranks of one job."""

    ranks: int
    hang_timeout_s: float
    group_timeout_s: float
    """Time-out of the operations of the process groups."""
    _observed: dict[int, ObservedRank] = field(default_factory=dict)
    _looked_s: float | None = None

    def observe(
        self, statuses: Mapping[int, RankStatus], busy: Set[int] = frozenset(), now_s: float | None = None
    ) -> Hang | None:
        """Take note of the newest status of each rank; return the hang if there is one.

        `busy` are ranks that compute, as their host says: they may be unable to report it.
        """
        now_s = time.monotonic() if now_s is None else now_s
        self._ignore_own_pause(now_s)
        for rank, status in statuses.items():
            self._note(self._observed.setdefault(rank, ObservedRank()), status, now_s)
        for rank in busy & self._observed.keys():
            self._observed[rank].active_s = now_s
        if len(self._observed) < self.ranks:  # A rank that has not started yet is limited by the time-out of the start.
            return None
        running = [found for found in self._observed.values() if found.status and not found.status.has_ended]
        if not running:
            return None
        idle_s = now_s - max(found.active_s for found in running)
        stalled_s = now_s - max(found.progress_s for found in running)
        if idle_s < self.hang_timeout_s and not self._group_gives_up(running, stalled_s):
            return None
        return self.describe(now_s)

    def describe(self, now_s: float | None = None) -> Hang:
        """Return what is known of all ranks that run, whether they hang or not."""
        now_s = time.monotonic() if now_s is None else now_s
        silent_after_s = SILENT_BEATS * beat_period_s(self.hang_timeout_s)
        running = {
            rank: found for rank, found in sorted(self._observed.items()) if found.status and not found.status.has_ended
        }
        return Hang(
            statuses={rank: found.status for rank, found in running.items() if found.status},
            stalled_s={rank: now_s - found.progress_s for rank, found in running.items()},
            silent_s={rank: now_s - f.beat_s for rank, f in running.items() if now_s - f.beat_s > silent_after_s},
            timeout_s=self.hang_timeout_s,
        )

    def _note(self, found: ObservedRank, status: RankStatus, now_s: float) -> None:
        before, found.status = found.status, status
        if before is None or status.beat != before.beat:
            found.beat_s = now_s
        if before is None or status.progress != before.progress:
            found.progress_s = found.active_s = now_s
        elif status.is_busy and status.beat != before.beat:
            found.active_s = now_s

    def _group_gives_up(self, running: list[ObservedRank], stalled_s: float) -> bool:
        """Return whether an operation that a rank waits in is about to end by the time-out of its group."""
        if self.group_timeout_s <= self.hang_timeout_s:
            return False  # The user wants it so.
        limit_s = max(self.hang_timeout_s, self.group_timeout_s - GROUP_MARGIN_S)
        return stalled_s > limit_s and any(found.status and found.status.operation for found in running)

    def last_seen(self) -> Hang:
        """Return what was known of all ranks when they were observed last."""
        return self.describe(self._looked_s)

    def silent(self, now_s: float | None = None) -> set[int]:
        """Return the ranks that do not report any more."""
        return set(self.describe(now_s).silent_s)

    def _ignore_own_pause(self, now_s: float) -> None:
        """Leave out the time in which this process did not run, for example because Ctrl-Z stopped all processes."""
        looked_s, self._looked_s = self._looked_s, now_s
        if looked_s is None:
            return
        pause_s = now_s - looked_s
        if pause_s > PAUSE_BEATS * beat_period_s(self.hang_timeout_s):
            for found in self._observed.values():
                found.beat_s += pause_s
                found.progress_s += pause_s
                found.active_s += pause_s
