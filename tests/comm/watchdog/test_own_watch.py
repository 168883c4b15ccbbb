"""Watchdog of a program under another launcher: ranks judge each other."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from paceline.comm import Comm
from paceline.comm.stores.side_connection import signer_of_world, store_of_world
from paceline.comm.stores.signed import SignedStore
from paceline.comm.watchdog import own_watch
from paceline.comm.watchdog.own_watch import OwnWatch, start_own_watch
from paceline.comm.watchdog.reporter import connect
from paceline.comm.watchdog.store_reader import StatusReader
from paceline.errors import HangError
from paceline.signing import Signer
from ranks import Pool

HANG_S = 2.0
LIMIT_S = 60


def compute_and_sleep(comm: Comm) -> tuple[bool, str | None]:
    """Let rank 1 compute for longer than the time-out, and then sleep until the hang was detected.

    Return whether anything was detected while it computed, and the error that this rank shows.
    """
    store, ended, errors = store_of_world(), threading.Event(), list[HangError | None]()
    assert store is not None

    def end(error: HangError | None) -> None:
        errors.append(error)
        ended.set()
        if error is not None:
            store.set("shown", "yes")

    watch = OwnWatch(lambda: connect(store.host, store.port, None), comm.rank, 2, HANG_S, 90.0, end)
    began_s = time.monotonic()
    while comm.rank == 1 and time.monotonic() < began_s + 2 * HANG_S:
        torch.ones(300, 300) @ torch.ones(300, 300)
    dist.all_reduce(torch.zeros(1), group=comm.group)
    detected_early = ended.is_set()
    if comm.rank == 1:
        load_nothing(store)
    dist.all_reduce(torch.zeros(1), group=comm.group)
    watch.stop()
    return detected_early, errors[0].message if errors and errors[0] is not None else None


def load_nothing(store: TCPStore) -> None:
    """Sleep until the other rank shows an error."""
    deadline_s = time.monotonic() + LIMIT_S
    while not store.check(["shown"]) and time.monotonic() < deadline_s:
        time.sleep(0.1)


def test_a_rank_that_computes_is_not_hung_and_one_that_sleeps_is(pool: Pool) -> None:
    (early_0, shown), (early_1, hidden) = pool.run(compute_and_sleep, 2)
    assert not early_0
    assert not early_1
    assert hidden is None, "one rank shows the error"
    assert shown is not None
    assert "rank 0 waits in all_reduce at test_own_watch.py:" in shown
    assert "rank 1 was last seen in load_nothing (test_own_watch.py:" in shown


def start_two_watches(comm: Comm) -> tuple[list[int], bool]:
    """Watch twice; return the numbers of the watches, and whether one reads a status of an earlier one."""
    store, numbers, key = store_of_world(), list[int](), f"status-{comm.rank}"
    assert store is not None

    def connect_and_count(address: str, port: int, signer: Signer | None, watch: int) -> SignedStore:
        numbers.append(watch)
        return connect(address, port, signer, watch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_watch, "connect", connect_and_count)
        for _ in range(2):
            start_own_watch(HANG_S, 90.0)()
    first, later = min(numbers), max(numbers) + 1
    store.set(f"paceline-watchdog-{later}/{key}", store.get(f"paceline-watchdog-{first}/{key}"))  # type: ignore[arg-type]
    store.get(f"paceline-watchdog-{later}/{key}")
    reader = StatusReader(comm.rank + 1)
    return numbers, comm.rank in reader.read(connect(store.host, store.port, signer_of_world(), later))


def test_a_status_of_an_earlier_watch_does_not_count(pool: Pool) -> None:
    """Its number is higher than those of the first statuses of a later watch, which would be ignored."""
    (numbers, reads), other = pool.run(start_two_watches, 2)
    assert (numbers, reads) == other
    assert len(set(numbers)) == 2
    assert not reads
