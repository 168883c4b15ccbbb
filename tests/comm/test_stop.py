"""Ranks that agree on a step at which they stop, in every order of their looks at a real store."""

from __future__ import annotations

import random
import threading
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from paceline.comm import stop
from paceline.comm.stop import StopRequest, request_stop
from paceline.launch import rendezvous


@pytest.fixture
def store() -> TCPStore:
    listener = rendezvous.bind()
    return rendezvous.open_store("127.0.0.1", listener.getsockname()[1], listener, timedelta(seconds=10))


def view(store: TCPStore) -> PrefixStore:
    """Return the store as a rank sees it: by another connection, with prefixes."""
    own = rendezvous.open_store(store.host, store.port, None, timedelta(seconds=10))
    return PrefixStore("paceline", PrefixStore("world-1", own))


def test_without_a_request_no_step_is_announced(store: TCPStore) -> None:
    ranks = [StopRequest(view(store)) for _ in range(2)]
    assert [(rank.requested(), rank.announced()) for rank in ranks] == [(False, None)] * 2


def test_rank_0_waits_until_every_rank_knows_the_request(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = (StopRequest(view(store)) for _ in range(2))
    assert other.announced() is None
    request_stop(store)
    assert not first.requested()  # The other rank looks again after `POLL_S`.
    monkeypatch.setattr(stop, "POLL_S", 0.0)
    other._look_at_s = 0.0
    assert other.announced() is None
    assert first.requested()
    first.announce(7)
    assert (first.announced(), other.announced()) == (7, 7)


@pytest.mark.parametrize("seed", range(4))
def test_all_ranks_in_step_stop_at_the_same_step(store: TCPStore, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks step together, as with an all-reduce; the request comes at any time."""
    monkeypatch.setattr(stop, "POLL_S", 0.003)
    ranks, stopped = 3, {}
    in_step = threading.Barrier(ranks)

    def train(rank: int) -> None:
        own = StopRequest(view(store))
        for step in range(1, 100_000):
            in_step.wait(20)
            if rank == 0 and own.announced() is None and own.requested():
                own.announce(step + 2)
            if own.announced() == step:
                stopped[rank] = step
                return

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    threading.Event().wait(random.Random(seed).uniform(0, 0.05))
    request_stop(store)
    for thread in threads:
        thread.join(20)
    assert len(stopped) == ranks
    assert len(set(stopped.values())) == 1
