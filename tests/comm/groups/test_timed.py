"""The timed process group behaves like a plain one on real ranks, and records every operation once."""

from __future__ import annotations

import gc
import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.comm import Comm, close_comm, open_comm
from paceline.comm.groups.timed import TimedGroup, carrying
from paceline.measure.steps import make_stopwatch
from paceline.records.timeline import NO_PEER, Purpose, RowKind
from ranks import SIZE, Pool, wait_for_released_groups

pytestmark = pytest.mark.takes(4)

CPU = torch.device("cpu")
RANKS = 3
ITEMS = 6
"""Items (float32) in each rank's tensor."""
BYTES = 4 * ITEMS

# Renamed in torch 2.13.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_from = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Group = dist.ProcessGroup
Rows = list[tuple[RowKind, int, int]]
"""Kind, bytes, peer."""


def open_timed(ranks: int = RANKS, timeout_s: float = 30) -> Comm | None:
    """Create groups of the first ranks whose operations are recorded; called on all ranks of the pool."""
    return open_comm(
        range(ranks), device=CPU, backend="gloo", timeout_s=timeout_s, stopwatch=make_stopwatch(CPU, events=True)
    )


def rows_of(comm: Comm, work: Callable[[], Any]) -> list[tuple[Any, ...]]:
    """Return the rows of the operations in a step that consists of `work`."""
    assert comm.stopwatch is not None
    log = comm.stopwatch.operations
    assert log is not None
    log.begin_step(0)
    work()
    log.poll()  # As at the end of backward: the thread that records an end may not have run yet.
    log.end_step()
    return log.take_rows()


# Each operation is called on every rank with a group and this rank's tensor, and returns its result.


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
    gathered = [torch.empty_like(own) for _ in range(RANKS)] if group.rank() == 1 else None
    dist.gather(own, gathered, group_dst=1, group=group)
    return gathered


def scatter(group: Group, own: Tensor) -> Tensor:
    parts = [own + rank for rank in range(RANKS)] if group.rank() == 1 else None
    result = torch.empty_like(own)
    dist.scatter(result, parts, group_src=1, group=group)
    return result


def all_gather(group: Group, own: Tensor) -> list[Tensor]:
    gathered = [torch.empty_like(own) for _ in range(RANKS)]
    dist.all_gather(gathered, own, group=group)
    return gathered


def all_gather_into_tensor(group: Group, own: Tensor) -> Tensor:
    gathered = own.new_empty(RANKS * ITEMS)
    gather_into(gathered, own, group=group)
    return gathered


def all_gather_coalesced(group: Group, own: Tensor) -> Tensor:
    gathered = own.new_empty(2, RANKS * ITEMS // 2)
    with dist._coalescing_manager(group):
        for result, part in zip(gathered, own.chunk(2), strict=True):
            gather_into(result, part, group=group)
    return gathered


def all_gather_objects(group: Group, _: Tensor) -> list[Any]:
    gathered = [None] * RANKS
    dist.all_gather_object(gathered, group.rank(), group=group)
    return gathered


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
    """Send to the next rank of a ring, and receive from the one before."""
    rank, size, received = group.rank(), group.size(), torch.empty_like(own)
    works = [
        dist.isend(own, group_dst=(rank + 1) % size, group=group),
        dist.irecv(received, group_src=(rank - 1) % size, group=group),
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


def recv_from_any_source(group: Group, own: Tensor) -> Tensor:
    if group.rank() == 1:
        dist.send(own, group_dst=0, group=group)
    elif group.rank() == 0:
        assert dist.recv(own, group=group) == 1
    return own


def barrier(group: Group, _: Tensor) -> None:
    dist.barrier(group)


RING: dict[int, Rows] = {
    rank: [(RowKind.SEND, BYTES, (rank + 1) % RANKS), (RowKind.RECV, BYTES, (rank - 1) % RANKS)]
    for rank in range(RANKS)
}
EXPECTED: dict[Callable[..., Any], Rows | dict[int, Rows]] = {
    all_reduce: [(RowKind.ALL_REDUCE, BYTES, NO_PEER)],
    all_reduce_max: [(RowKind.ALL_REDUCE, BYTES, NO_PEER)],
    all_reduce_async: [(RowKind.ALL_REDUCE, BYTES, NO_PEER)],
    all_reduce_by_future: [(RowKind.ALL_REDUCE, BYTES, NO_PEER)],
    all_reduce_polled: [(RowKind.ALL_REDUCE, BYTES, NO_PEER)],
    all_reduce_coalesced: [(RowKind.ALL_REDUCE, BYTES, NO_PEER)],
    broadcast: [(RowKind.BROADCAST, BYTES, 1)],
    reduce: [(RowKind.REDUCE, BYTES, 2)],
    gather: [(RowKind.GATHER, RANKS * BYTES, 1)],
    scatter: [(RowKind.SCATTER, RANKS * BYTES, 1)],
    all_gather: [(RowKind.ALL_GATHER, RANKS * BYTES, NO_PEER)],
    all_gather_into_tensor: [(RowKind.ALL_GATHER, RANKS * BYTES, NO_PEER)],
    all_gather_coalesced: [(RowKind.ALL_GATHER, RANKS * BYTES, NO_PEER)],
    all_gather_objects: [(RowKind.ALL_GATHER, RANKS * 8, NO_PEER), (RowKind.ALL_GATHER, RANKS * 5, NO_PEER)],
    reduce_scatter: [(RowKind.REDUCE_SCATTER, BYTES, NO_PEER)],
    reduce_scatter_tensor: [(RowKind.REDUCE_SCATTER, BYTES, NO_PEER)],
    reduce_scatter_coalesced: [(RowKind.REDUCE_SCATTER, 2 * BYTES, NO_PEER)],
    all_to_all_single: [(RowKind.ALL_TO_ALL, BYTES, NO_PEER)],
    all_to_all_uneven: [(RowKind.ALL_TO_ALL, BYTES, NO_PEER)],
    send_and_recv: {0: [(RowKind.RECV, BYTES, 2)], 1: [], 2: [(RowKind.SEND, BYTES, 0)]},
    isend_and_irecv: RING,
    batch_of_messages: RING,
    recv_from_any_source: {0: [(RowKind.RECV, BYTES, NO_PEER)], 1: [(RowKind.SEND, BYTES, 0)], 2: []},
    barrier: [(RowKind.BARRIER, 0, NO_PEER)],
}


def do_all(_: Comm) -> dict[str, Any] | None:
    """Run every operation on a plain and on a timed group; return both results and the rows of the timed one."""
    comm = open_timed()
    if comm is None:
        return None
    found = {}
    for operation in EXPECTED:
        results: list[Any] = []

        def do(group: Group, operation: Any = operation, results: list[Any] = results) -> None:
            results.append(operation(group, torch.arange(ITEMS, dtype=torch.float32) * 10 ** (comm.rank + 1)))

        do(comm.control.group)
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


@dataclass(frozen=True)
class Waits:
    """Rows of all-reduces that were waited for in several ways while rank 1 was late."""

    rows: dict[str, tuple[Any, ...]]
    origin_s: float
    """Origin of this rank's times, on the host's clock."""
    waited_from_s: float
    """Time at which the compute thread began to wait, after other work."""


LATE_S = 0.05


def wait_in_every_way(_: Comm) -> Waits | None:
    comm = open_timed(2)
    if comm is None:
        return None
    tensor = torch.ones(2)
    now = comm.stopwatch.clock.now
    waited_from: list[float] = []

    def be_late() -> None:
        dist.barrier(comm.control.group)
        time.sleep(LATE_S * comm.rank)

    def at_once() -> None:
        be_late()
        dist.all_reduce(tensor, group=comm.group)

    def later() -> None:
        be_late()
        work = dist.all_reduce(tensor, group=comm.group, async_op=True)
        time.sleep(LATE_S / 2)
        waited_from.append(now())
        work.wait()

    def never() -> None:
        be_late()
        dist.all_reduce(tensor, group=comm.group, async_op=True).get_future().wait()

    def elsewhere() -> None:
        be_late()
        thread = threading.Thread(target=lambda: dist.all_reduce(tensor, group=comm.group))
        thread.start()
        thread.join()

    rows = {}
    for work in (at_once, later, never, elsewhere):
        (rows[work.__name__],) = rows_of(comm, work)
    close_comm(comm)
    return Waits(rows, comm.stopwatch.clock.origin_s, *waited_from)


def test_the_time_from_which_the_compute_thread_waits(pool: Pool) -> None:
    early, late, *_ = pool.run(wait_in_every_way, SIZE)
    for waits in (early, late):
        starts, froms = ({name: row[i] for name, row in waits.rows.items()} for i in (5, 7))
        assert froms["at_once"] == starts["at_once"]
        assert math.isnan(froms["never"])
        assert math.isnan(froms["elsewhere"]), "another thread's wait does not stop compute"
    assert early.rows["later"][7] >= early.waited_from_s > early.rows["later"][5]
    for name, row in early.rows.items():
        arrived_s = late.rows[name][5] + late.origin_s
        assert row[6] + early.origin_s > arrived_s, f"{name}: it lasts until the late rank arrives"


def between_steps(_: Comm) -> list[Any] | None:
    comm = open_timed(2)
    if comm is None:
        return None
    log, tensor = comm.stopwatch.operations, torch.ones(3)
    dist.all_reduce(tensor, group=comm.group)
    before = log.take_rows()

    def work() -> None:
        with carrying(comm.group, Purpose.STATISTICS):
            dist.all_reduce(tensor, group=comm.group)
            with comm.carrying(Purpose.BUFFERS):
                dist.broadcast(tensor, group_src=0, group=comm.group)
            dist.all_reduce(tensor, group=comm.group)
        dist.all_reduce(tensor, group=comm.group)

    rows = rows_of(comm, work)
    dist.all_reduce(tensor, group=comm.group)
    after = log.take_rows()
    with carrying(comm.control.group, Purpose.WEIGHTS):  # Operations on a plain group are not recorded.
        dist.all_reduce(tensor, group=comm.control.group)
    close_comm(comm)
    return [before, [row[2] for row in rows], after]


def test_purposes_are_recorded_and_nothing_between_steps(pool: Pool) -> None:
    purposes = [Purpose.STATISTICS, Purpose.BUFFERS, Purpose.STATISTICS, Purpose.GRADIENTS]
    assert pool.run(between_steps, SIZE)[:2] == [[[], purposes, []]] * 2


def use_subgroups(_: Comm) -> dict[str, Any]:
    """Use two groups of two ranks: broadcast from the second rank of each, and send from its first to its second."""
    before = len(dist.distributed_c10d._world.pg_map)
    comm = open_timed(SIZE)
    assert comm is not None
    left, right = comm.subgroup([0, 1]), comm.subgroup([3, 2])
    own, other = (left, right) if comm.rank < 2 else (right, left)
    tensor = torch.tensor([float(comm.rank)])

    def work() -> None:
        dist.broadcast(tensor, group_src=1, group=own)
        if own.rank() == 0:
            dist.send(tensor, group_dst=1, group=own)
        else:
            dist.recv(tensor, group_src=0, group=own)

    rows = rows_of(comm, work)
    is_member = isinstance(other, dist.ProcessGroup)
    close_comm(comm)
    left_over = len(dist.distributed_c10d._world.pg_map) - before
    dist.barrier()
    return {"value": tensor.item(), "rows": rows, "is_member": is_member, "left_over": left_over}


def test_subgroups_are_timed_and_destroyed(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(use_subgroups, SIZE)):
        first = rank // 2 * 2
        message = (RowKind.SEND, 4, first + 1) if rank == first else (RowKind.RECV, 4, first)
        assert [(row[1], row[4], row[3]) for row in found["rows"]] == [(RowKind.BROADCAST, 4, first + 1), message]
        assert found["value"] == first + 1
        assert (found["is_member"], found["left_over"]) == (False, 0)


def subgroups_of_a_part(_: Comm) -> list[tuple[RowKind, int, float]] | None:
    """Open two runs of three ranks in turn, each with a subgroup of the first two ranks and one of all three."""
    found = []
    for _ in range(2):
        comm = open_timed(3)
        if comm is None:
            continue
        first, whole = comm.subgroup([0, 1]), comm.subgroup(range(3))
        tensor = torch.ones(1)

        def work(comm: Comm = comm, first: Any = first, whole: Any = whole, tensor: Any = tensor) -> None:
            if comm.rank < 2:
                dist.all_reduce(tensor, group=first)
            dist.all_reduce(tensor, group=whole)

        found += [(RowKind(row[1]), row[4], float(tensor)) for row in rows_of(comm, work)]
        close_comm(comm)
    return found


def test_subgroups_of_a_run_that_does_not_use_all_ranks(pool: Pool) -> None:
    of_the_two = [(RowKind.ALL_REDUCE, 4, 5.0)] * 2
    assert pool.run(subgroups_of_a_part, SIZE) == [of_the_two * 2, of_the_two * 2, of_the_two[:1] * 2, []]


def backend_of_timed_group(_: Comm) -> tuple[str, list[RowKind]] | None:
    comm = open_timed(2)
    if comm is None:
        return None
    assert dist.get_backend(comm.group) == comm.backend
    rows = rows_of(comm, lambda: dist.monitored_barrier(comm.group, wait_all_ranks=True))
    close_comm(comm)
    return comm.backend, [row[1] for row in rows]


def test_the_backend_is_that_of_the_inner_group(pool: Pool) -> None:
    assert pool.run(backend_of_timed_group, SIZE)[:2] == [("gloo", [RowKind.BARRIER])] * 2


def train_under_ddp(_: Comm) -> dict[str, Any] | None:
    """Run four steps of PyTorch's DDP with two buckets, on a timed group and on a plain one."""
    comm = open_timed(2)
    if comm is None:
        return None
    found: dict[str, Any] = {"rows": []}
    for name, group in (("timed", comm.group), ("plain", comm.control.group)):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=size / 2 / 2**20)

        def step(ddp: nn.Module = ddp) -> None:
            ddp.zero_grad()
            ddp(torch.full((2, 64), comm.rank + 1.0)).sum().backward()

        for _ in range(4):
            rows = rows_of(comm, step)
            if name == "timed":
                found["rows"].append(rows)
        found[name] = [p.grad.clone() for p in model.parameters()]
        found["bytes"] = size
    close_comm(comm)
    return found


def test_buckets_that_ddp_sends_are_recorded(pool: Pool) -> None:
    for found in pool.run(train_under_ddp, SIZE)[:2]:
        torch.testing.assert_close(found["timed"], found["plain"], rtol=0, atol=0)
        rebuilt, *steps = found["rows"][1:]
        assert [row[1] for row in rebuilt] == [RowKind.BROADCAST] * 2 + [RowKind.ALL_REDUCE] * 2, (
            "ranks agree on new buckets"
        )
        for rows in steps:
            assert [row[1] for row in rows] == [RowKind.ALL_REDUCE] * 2
            assert sum(row[4] for row in rows) == found["bytes"]
            assert all(math.isnan(row[7]) for row in rows), (
                "DDP's wait shows in the end of backward, not in a recorded wait"
            )


def left_behind(_: Comm) -> list[str]:
    """Open, use and destroy timed groups four times; return a text for each count that grew after the second time."""
    wait_for_released_groups()
    left, before = [], dict[str, int]()
    for repeat in range(4):
        comm = open_timed(SIZE)
        assert comm is not None
        assert isinstance(comm.group, TimedGroup)
        tensor = torch.ones(5)

        def work(comm: Comm = comm, tensor: Tensor = tensor) -> None:
            dist.all_reduce(tensor, group=comm.group)
            dist.all_reduce(tensor, group=comm.group, async_op=True).get_future().then(lambda done: done.value()).wait()
            isend_and_irecv(comm.group, tensor)

        rows_of(comm, work)
        close_comm(comm)
        del comm, tensor, work
        gc.collect()
        now = {
            "groups": len(dist.distributed_c10d._world.pg_map),
            "threads": psutil.Process().num_threads(),
            "open files": psutil.Process().num_fds(),
            "groups in memory": sum(type(thing) is TimedGroup for thing in gc.get_objects()),
            "tensors": sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()),
        }
        if repeat > 1:
            left += [f"{key}: {before[key]} then {now[key]}" for key in before if now[key] > before[key]]
        before = now
    dist.barrier()
    return left


def test_destroyed_groups_leave_nothing_behind(pool: Pool) -> None:
    assert pool.run(left_behind, SIZE) == [[]] * SIZE


def destroy_at_once(_: Comm) -> None:
    """Destroy groups while Gloo's threads are still releasing the last operation."""
    for _ in range(10):
        comm = open_timed(SIZE)
        assert comm is not None

        def work(comm: Comm = comm) -> None:
            for _ in range(3):
                dist.all_reduce(torch.ones(5), group=comm.group, async_op=True).get_future().wait()

        rows_of(comm, work)
        close_comm(comm)
        del comm, work


def test_a_group_may_be_destroyed_right_after_an_operation(pool: Pool) -> None:
    pool.run(destroy_at_once, SIZE)


def fail_by_mistake(_: Comm) -> dict[str, list[str]] | None:
    """Return the errors of wrong arguments on a plain and on a timed group."""
    comm = open_timed(2)
    if comm is None:
        return None
    mistakes: dict[str, Callable[[Group], Any]] = {
        "wrong root": lambda group: dist.broadcast(torch.ones(2), group_src=7, group=group),
        "wrong sizes": lambda group: dist.all_gather([torch.ones(2), torch.ones(3)], torch.ones(2), group=group),
        "wrong kind": lambda group: dist.all_reduce(torch.ones(2).to_sparse(), dist.ReduceOp.MAX, group=group),
    }
    failed = {name: errors_of(comm, mistake) for name, mistake in mistakes.items()}
    close_comm(comm)
    return failed


def errors_of(comm: Comm, attempt: Callable[[Group], Any]) -> list[str]:
    """Return the errors of an attempt on a plain and on a timed group."""
    failed = []
    for group in (comm.control.group, comm.group):
        log = comm.stopwatch.operations
        log.begin_step(0)
        try:
            attempt(group)
        except Exception as error:
            failed.append(f"{type(error).__name__}: {re.sub(r'[0-9]+', '…', str(error))}")
        log.end_step()
        log.take_rows()
    return failed


def test_errors_are_those_of_a_plain_group(pool: Pool) -> None:
    for failed in pool.run(fail_by_mistake, SIZE)[:2]:
        for name, errors in failed.items():
            assert len(errors) == 2, f"{name} did not fail"
            assert errors[0] == errors[1]


WITHOUT_PEER: dict[str, Callable[[Group], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(2), group=group),
    "async": lambda group: dist.all_reduce(torch.ones(2), group=group, async_op=True).wait(),
    "recv": lambda group: dist.recv(torch.ones(2), group_src=1, group=group),
    "short": lambda group: dist.irecv(torch.ones(2), group_src=1, group=group).wait(timedelta(milliseconds=100)),
}


def wait_without_peer(all_ranks: Comm, name: str) -> list[str]:
    """Let rank 0 wait for rank 1, which does not participate; return the errors of rank 0."""
    comm, failed = open_timed(2, timeout_s=30 if name == "short" else 0.2), list[str]()
    if comm is not None and comm.rank == 0:
        failed = errors_of(comm, WITHOUT_PEER[name])
    all_ranks.control.barrier()
    if comm is not None:
        close_comm(comm)
    return failed


@pytest.mark.parametrize("name", WITHOUT_PEER)
def test_a_missing_peer_is_the_same_error_as_on_a_plain_group(pool: Pool, name: str) -> None:
    on_plain, on_timed = pool.run(wait_without_peer, SIZE, name)[0]
    assert on_plain == on_timed
    assert "Timed out waiting" in on_timed
