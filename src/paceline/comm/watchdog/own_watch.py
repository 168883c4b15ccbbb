"""Watchdog of a program that another launcher started, such as torchrun: every rank judges, and ends itself.

A hang needs a rank that waits in an operation here: a program that does nothing on any rank may well want that.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from paceline.comm.stores.side_connection import signer_of_world, store_of_world
from paceline.comm.stores.signed import SignedStore
from paceline.comm.watchdog.description import Surroundings, hang_error, is_waiting
from paceline.comm.watchdog.judge import Hang, HangJudge
from paceline.comm.watchdog.reporter import Reporter, beat_period_s, connect
from paceline.comm.watchdog.store_reader import StatusReader
from paceline.errors import HangError
from paceline.formatting import escape_controls, short_seconds
from paceline.measure.process_use import process_state

LATER_BEATS = 4
"""Periods after which ranks end that do not show the error."""


class OwnWatch:
    """Watch of all ranks by this rank, from its creation to `stop`."""

    def __init__(
        self,
        connect_once: Callable[[], SignedStore],
        rank: int,
        ranks: int,
        hang_timeout_s: float,
        group_timeout_s: float,
        end: Callable[[HangError | None], None],
        checks_collectives: bool = False,
    ) -> None:
        """`end` is called if there is a hang, with the error to show, on one rank; None on the others."""
        self._rank = rank
        self._period_s = beat_period_s(hang_timeout_s)
        self._hang_timeout_s = hang_timeout_s
        self._judge = HangJudge(ranks, hang_timeout_s, group_timeout_s)
        self._reader = StatusReader(ranks)
        self._end = end
        self._checks_collectives = checks_collectives
        self._looked_s = time.monotonic()
        self._done = threading.Event()
        self._reporter = Reporter(connect_once(), rank, hang_timeout_s, on_beat=self._check_store)
        self._store = connect_once()
        self._thread = threading.Thread(target=self._run, daemon=True, name="paceline-hang-watch")
        self._reporter.start()
        self._thread.start()

    def stop(self) -> None:
        """Stop, and report that this rank needs no watch any more."""
        self._done.set()
        self._thread.join(self._period_s)
        self._reporter.stop()

    def _run(self) -> None:
        with suppress(RuntimeError):  # The store is gone: its program has ended.
            while not self._done.wait(self._period_s):
                statuses = self._reader.read(self._store)
                self._looked_s = time.monotonic()
                hang = self._judge.observe(statuses)
                if hang is not None and any(is_waiting(rank, hang) for rank in hang.statuses):
                    self._end(self._error(hang))
                    return

    def _error(self, hang: Hang) -> HangError | None:
        """Return the error on the first rank that answers, None on the others."""
        answering = [rank for rank in hang.statuses if rank not in hang.silent_s]
        if not answering or answering[0] != self._rank:
            return None
        host = hang.statuses[self._rank].host
        here = {rank: status.pid for rank, status in hang.statuses.items() if status.host == host}
        names = {status.host for status in hang.statuses.values()}
        hosts = {rank: status.host for rank, status in hang.statuses.items()} if len(names) > 1 else {}
        states = {rank: process_state(pid) for rank, pid in here.items()}
        around = Surroundings(states, hosts, checks_collectives=self._checks_collectives, in_program=True)
        return hang_error(hang, around, None)

    def _check_store(self) -> None:
        """End this rank if the store does not answer; called by the thread that never waits for it."""
        silent_s = time.monotonic() - self._looked_s
        if silent_s > self._hang_timeout_s + self._period_s and not self._done.is_set():
            self._end(
                HangError(
                    f"rank {self._rank} has not reached the store of the launch for {short_seconds(round(silent_s))}.",
                    hint="check that the host of rank 0 runs and that the network reaches it",
                )
            )


_watches: list[OwnWatch] = []
"""The watch of this process, if there is one."""
_started = itertools.count()
"""Numbers of the watches that this process has started, the same on all ranks."""


def start_own_watch(
    hang_timeout_s: float, group_timeout_s: float, *, checks_collectives: bool = False
) -> Callable[[], None]:
    """Watch the ranks of the world; return the function that stops it.

    There is one watch in a process, and none without other ranks, or if their store is not reached by TCP.
    """
    store = store_of_world()
    if not hang_timeout_s or dist.get_world_size() == 1 or store is None or _watches:
        return lambda: None
    address, port, signer, number = store.host, store.port, signer_of_world(), next(_started)
    watch = OwnWatch(
        lambda: connect(address, port, signer, number),
        dist.get_rank(),
        dist.get_world_size(),
        hang_timeout_s,
        group_timeout_s,
        lambda error: _end_process(error, beat_period_s(hang_timeout_s)),
        checks_collectives,
    )
    _watches.append(watch)

    def stop() -> None:
        _watches.remove(watch)
        watch.stop()

    return stop


def _end_process(error: HangError | None, period_s: float) -> None:
    """Show the error, and end this process when all ranks have had time to detect the hang, too.

    The rank that shows the error ends first: without the others, it would fail before it has detected the hang.
    """
    if error is not None:
        lines = [escape_controls(error.detail or ""), f"error: {error.message}", f"hint: {error.hint}"]
        print(*[line for line in lines if line], sep="\n", file=sys.stderr, flush=True)
    time.sleep(period_s if error is not None else LATER_BEATS * period_s)
    os._exit(HangError.exit_code)
