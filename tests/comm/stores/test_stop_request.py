"""Request to stop, between a launcher and ranks that see the store of their job through prefixes."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from paceline.comm.stores.stop_request import NO_STOP, StopRequest, request_stop
from paceline.launch import rendezvous


def test_ranks_see_the_request_and_the_announced_step() -> None:
    listener = rendezvous.bind()
    port, limit = listener.getsockname()[1], timedelta(seconds=10)
    store = rendezvous.open_store("127.0.0.1", port, listener, limit)
    ranks = [
        StopRequest(
            PrefixStore("paceline", PrefixStore("world-1", rendezvous.open_store("127.0.0.1", port, None, limit)))
        )
        for _ in range(2)
    ]
    assert [(rank.requested(), rank.announced()) for rank in ranks] == [(False, None)] * 2
    request_stop(store)
    assert [(rank.requested(), rank.announced()) for rank in ranks] == [(True, None)] * 2
    ranks[0].announce(7)
    assert [rank.announced() for rank in ranks] == [7, 7]


def test_a_run_that_nobody_can_stop() -> None:
    assert not NO_STOP.is_possible
    assert not NO_STOP.requested()
    assert NO_STOP.announced() is None
