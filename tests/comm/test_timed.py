"""The timed process group does what a plain one does, on real ranks, and notes every operation once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.comm import Comm, close_comm, open_comm
from paceline.comm.timed import TimedGroup, carrying
from paceline.measure.steps import make_stopwatch
from paceline.records.timeline import NO_PEER, Kind, Purpose
from ranks import SIZE, Pool

CPU = torch.device("cpu")
RANKS = 3
ITEMS = 6
"""Of float32 in the tensor that each rank brings along."""
BYTES = 4 * ITEMS

# These two have other names since torch 2.13.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_from = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Group = dist.ProcessGroup
Rows = list[tuple[Kind, int, int]]
"""Kind, bytes, peer."""


def open_timed(ranks: int = RANKS, timeout_s: float = 30) -> Comm | None:
    """Groups over the first ranks, whose operations are noted; called on all ranks of the pool."""
    return open_comm(
        range(ranks), device=CPU, backend="gloo", timeout_s=timeout_s, stopwatch=make_stopwatch(CPU, events=True)
    )


def rows_of(comm: Comm, work: Callable[[], Any]) -> list[tuple[Any, ...]]:
    """The rows of what happens in a step that consists of `work`."""
    assert comm.stopwatch is not None
    log = comm.stopwatch.operations
    assert log is not None
    log.begin_step(0)
    work()
    log.end_step()
    dist.barrier(comm.control)  # An end that another thread has to note was noted by now.
    return log.take_rows()


# Each operation is called on every rank with a group and this rank's tensor, and returns what it gave.


def all_reduce(group: Group, own: Tensor) -> Tensor:
    dist.all_reduce(own, group=group)
    return own


def all_reduce_max(group: Group, own: Tensor) -> Tensor:
    dist.all_reduce(own, dist.ReduceOp.MAX, group=group)
    return own


def all_reduce_async(group: Group, own: Tensor) -> Tensor:
    work = dist.all_reduce(own, group=group, async_op=True)
    work.wait()
    assert work.is_completed()
    assert work.is_success()
    return own


def all_reduce_by_future(group: Group, own: Tensor) -> Tensor:
    future = dist.all_reduce(own, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0] / 2).wait()


def all_reduce_polled(group: Group, own: Tensor) -> Tensor:
    work = dist.all_reduce(own, group=group, async_op=True)
    while not work.is_completed():
        pass
    return own


def all_reduce_coalesced(group: Group, own: Tensor) -> Tensor:
    with dist._coalescing_manager(group):
        for part in own.chunk(2):
            dist.all_reduce(part, group=group)
    return own


def broadcast(group: Group, own: Tensor) -> Tensor:
    dist.broadcast(own, group_src=1, group=group)
    return own


def reduce(group: Group, own: Tensor) -> Tensor | None:
    dist.reduce(own, group_dst=2, group=group)
    return own if group.rank() == 2 else None


def gather(group: Group, own: Tensor) -> list[Tensor] | None:
    everyone = [torch.empty_like(own) for _ in range(RANKS)] if group.rank() == 1 else None
    dist.gather(own, everyone, group_dst=1, group=group)
    return everyone


def scatter(group: Group, own: Tensor) -> Tensor:
    parts = [own + rank for rank in range(RANKS)] if group.rank() == 1 else None
    result = torch.empty_like(own)
    dist.scatter(result, parts, group_src=1, group=group)
    return result


def all_gather(group: Group, own: Tensor) -> list[Tensor]:
    everyone = [torch.empty_like(own) for _ in range(RANKS)]
    dist.all_gather(everyone, own, group=group)
    return everyone


def all_gather_into_tensor(group: Group, own: Tensor) -> Tensor:
    everyone = own.new_empty(RANKS * ITEMS)
    gather_into(everyone, own, group=group)
    return everyone


def all_gather_coalesced(group: Group, own: Tensor) -> Tensor:
    everyone = own.new_empty(2, RANKS * ITEMS // 2)
    with dist._coalescing_manager(group):
        for result, part in zip(everyone, own.chunk(2), strict=True):
            gather_into(result, part, group=group)
    return everyone


def all_gather_objects(group: Group, own: Tensor) -> list[Any]:
    everyone = [None] * RANKS
    dist.all_gather_object(everyone, group.rank(), group=group)
    return everyone


def reduce_scatter(group: Group, own: Tensor) -> Tensor:
    result = own.new_empty(ITEMS // RANKS)
    dist.reduce_scatter(result, list(own.chunk(RANKS)), group=group)
    return result


def reduce_scatter_tensor(group: Group, own: Tensor) -> Tensor:
    result = own.new_empty(ITEMS // RANKS)
    scatter_from(result, own, group=group)
    return result


def reduce_scatter_coalesced(group: Group, own: Tensor) -> Tensor:
    whole = own.repeat(2).view(2, ITEMS)
    result = own.new_empty(2, ITEMS // RANKS)
    with dist._coalescing_manager(group):
        for part, sum_of_part in zip(whole, result, strict=True):
            scatter_from(sum_of_part, part, group=group)
    return result


def all_to_all_single(group: Group, own: Tensor) -> Tensor:
    result = torch.empty_like(own)
    dist.all_to_all_single(result, own, group=group)
    return result


def all_to_all_uneven(group: Group, own: Tensor) -> Tensor:
    sends = [3, 2, 1]
    result = own.new_empty(RANKS * sends[group.rank()])
    dist.all_to_all_single(result, own, [sends[group.rank()]] * RANKS, sends, group=group)
    return result


def send_and_recv(group: Group, own: Tensor) -> Tensor:
    if group.rank() == 2:
        dist.send(own, group_dst=0, group=group)
    elif group.rank() == 0:
        assert dist.recv(own, group_src=2, group=group) == 2
    return own


def isend_and_irecv(group: Group, own: Tensor) -> Tensor:
    """Round the ring."""
    rank, received = group.rank(), torch.empty_like(own)
    works = [
        dist.isend(own, group_dst=(rank + 1) % RANKS, group=group),
        dist.irecv(received, group_src=(rank - 1) % RANKS, group=group),
    ]
    for work in works:
        work.wait()
    return received


def batch_of_messages(group: Group, own: Tensor) -> Tensor:
    rank, received = group.rank(), torch.empty_like(own)
    operations = [
        dist.P2POp(dist.isend, own, group_peer=(rank + 1) % RANKS, group=group),
        dist.P2POp(dist.irecv, received, group_peer=(rank - 1) % RANKS, group=group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def recv_from_anyone(group: Group, own: Tensor) -> Tensor:
    if group.rank() == 1:
        dist.send(own, group_dst=0, group=group)
    elif group.rank() == 0:
        assert dist.recv(own, group=group) == 1
    return own


def barrier(group: Group, _: Tensor) -> None:
    dist.barrier(group)


RING: dict[int, Rows] = {
    rank: [(Kind.SEND, BYTES, (rank + 1) % RANKS), (Kind.RECV, BYTES, (rank - 1) % RANKS)] for rank in range(RANKS)
}
EXPECTED: dict[Callable[..., Any], Rows | dict[int, Rows]] = {
    all_reduce: [(Kind.ALL_REDUCE, BYTES, NO_PEER)],
    all_reduce_max: [(Kind.ALL_REDUCE, BYTES, NO_PEER)],
    all_reduce_async: [(Kind.ALL_REDUCE, BYTES, NO_PEER)],
    all_reduce_by_future: [(Kind.ALL_REDUCE, BYTES, NO_PEER)],
    all_reduce_polled: [(Kind.ALL_REDUCE, BYTES, NO_PEER)],
    all_reduce_coalesced: [(Kind.ALL_REDUCE, BYTES, NO_PEER)],
    broadcast: [(Kind.BROADCAST, BYTES, 1)],
    reduce: [(Kind.REDUCE, BYTES, 2)],
    gather: [(Kind.GATHER, RANKS * BYTES, 1)],
    scatter: [(Kind.SCATTER, RANKS * BYTES, 1)],
    all_gather: [(Kind.ALL_GATHER, RANKS * BYTES, NO_PEER)],
    all_gather_into_tensor: [(Kind.ALL_GATHER, RANKS * BYTES, NO_PEER)],
    all_gather_coalesced: [(Kind.ALL_GATHER, RANKS * BYTES, NO_PEER)],
    all_gather_objects: [(Kind.ALL_GATHER, RANKS * 8, NO_PEER), (Kind.ALL_GATHER, RANKS * 5, NO_PEER)],
    reduce_scatter: [(Kind.REDUCE_SCATTER, BYTES, NO_PEER)],
    reduce_scatter_tensor: [(Kind.REDUCE_SCATTER, BYTES, NO_PEER)],
    reduce_scatter_coalesced: [(Kind.REDUCE_SCATTER, 2 * BYTES, NO_PEER)],
    all_to_all_single: [(Kind.ALL_TO_ALL, BYTES, NO_PEER)],
    all_to_all_uneven: [(Kind.ALL_TO_ALL, BYTES, NO_PEER)],
    send_and_recv: {0: [(Kind.RECV, BYTES, 2)], 1: [], 2: [(Kind.SEND, BYTES, 0)]},
    isend_and_irecv: RING,
    batch_of_messages: RING,
    recv_from_anyone: {0: [(Kind.RECV, BYTES, NO_PEER)], 1: [(Kind.SEND, BYTES, 0)], 2: []},
    barrier: [(Kind.BARRIER, 0, NO_PEER)],
}


def do_all(_: Comm) -> dict[str, Any] | None:
    """Every operation on a plain group and on a timed one: both results, and the rows of the latter."""
    comm = open_timed()
    if comm is None:
        return None
    found = {}
    for operation in EXPECTED:
        results: list[Any] = []

        def do(group: Group, operation: Any = operation, results: list[Any] = results) -> None:
            results.append(operation(group, torch.arange(ITEMS, dtype=torch.float32) * 10 ** (comm.rank + 1)))

        do(comm.control)
        before_s = comm.stopwatch.clock.now()
        rows = rows_of(comm, lambda do=do: do(comm.group))
        found[operation.__name__] = results, rows, before_s, comm.stopwatch.clock.now()
    close_comm(comm)
    return found


@pytest.fixture(scope="module")
def done(pool: Pool) -> list[dict[str, Any]]:
    return [answer for answer in pool.run(do_all, SIZE) if answer is not None]


@pytest.mark.parametrize("operation", EXPECTED, ids=lambda operation: operation.__name__)
def test_results_are_those_of_a_plain_group_and_there_is_one_row(done: list[dict[str, Any]], operation: Any) -> None:
    expected = EXPECTED[operation]
    for rank, answer in enumerate(done):
        (on_plain, on_timed), rows, before_s, after_s = answer[operation.__name__]
        torch.testing.assert_close(on_timed, on_plain, rtol=0, atol=0)
        own = expected[rank] if isinstance(expected, dict) else expected
        assert [(row[1], row[4], row[3]) for row in rows] == own
        for step, _, purpose, _, _, start_s, end_s, _, _ in rows:
            assert (step, purpose) == (0, Purpose.GRADIENTS)
            assert before_s < start_s < end_s < after_s
