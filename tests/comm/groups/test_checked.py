"""Checked process groups: calls that differ between ranks are named before they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.comm import Comm, close_comm, open_comm
from paceline.comm.groups.checked import CheckedGroup
from paceline.comm.groups.timed import TimedGroup
from paceline.errors import RankError
from paceline.measure.steps import make_stopwatch
from ranks import SIZE, Pool

CPU = torch.device("cpu")
RANKS = 3


def open_checked(ranks: int, *, timed: bool = True) -> Comm | None:
    stopwatch = make_stopwatch(CPU, events=True) if timed else None
    return open_comm(
        range(ranks), device=CPU, backend="gloo", timeout_s=20, stopwatch=stopwatch, check_collectives=True
    )


def call_everything(_: Comm, timed: bool) -> list[float]:
    """Call all kinds of operations, in order, and return some of the results; nothing is refused."""
    ours = open_checked(RANKS, timed=timed)
    if ours is None:
        return []
    group, rank = ours.group, ours.rank
    assert isinstance(group, TimedGroup if timed else CheckedGroup)
    total = torch.ones(4)
    dist.all_reduce(total, group=group)
    dist.all_reduce(total.view(2, 2) if rank else total, group=group)  # The same number of elements.
    parts = [torch.zeros(2) for _ in range(RANKS)]
    dist.all_gather(parts, torch.full((2,), float(rank)), group=group)
    dist.broadcast(total, group_src=1, group=group)
    dist.reduce(total, group_dst=0, group=group)
    dist.gather(torch.ones(1), [torch.zeros(1) for _ in range(RANKS)] if rank == 0 else None, group_dst=0, group=group)
    dist.scatter(torch.ones(1), [torch.ones(1)] * RANKS if rank == 0 else None, group_src=0, group=group)
    dist.barrier(group=group)
    for _ in range(3):  # All receive before they send: a check that waits would never end.
        received, nxt, last = torch.zeros(5), (rank + 1) % RANKS, (rank - 1) % RANKS
        works = [
            dist.irecv(received, group_src=last, group=group),
            dist.isend(torch.ones(5), group_dst=nxt, group=group),
        ]
        for work in works:
            assert work is not None
            work.wait()
    model = DistributedDataParallel(nn.Linear(3, 2), process_group=group)
    for _ in range(3):
        model(torch.ones(1, 3)).sum().backward()
    mean = float(ours.control.sum(torch.tensor([1.0])))
    close_comm(ours)
    return [float(parts[2][0]), mean, float(received[0])]


@pytest.mark.parametrize("timed", [True, False])
def test_calls_that_agree_run(pool: Pool, timed: bool) -> None:
    assert pool.run(call_everything, SIZE, timed)[:RANKS] == [[2.0, 3.0, 1.0]] * RANKS


def other_size(comm: Comm) -> None:
    dist.all_reduce(torch.zeros(7 if comm.rank else 9), group=comm.group)


def other_dtype(comm: Comm) -> None:
    dist.broadcast(torch.zeros(4, dtype=torch.float64 if comm.rank else torch.int64), group_src=0, group=comm.group)


def other_reduction(comm: Comm) -> None:
    dist.all_reduce(torch.zeros(4), dist.ReduceOp.MAX if comm.rank else dist.ReduceOp.SUM, group=comm.group)


def other_root(comm: Comm) -> None:
    dist.broadcast(torch.zeros(4), group_src=comm.rank, group=comm.group)


def other_kind(comm: Comm) -> None:
    if comm.rank:
        dist.barrier(group=comm.group)
    else:
        dist.all_reduce(torch.zeros(4), group=comm.group)


def skipped(comm: Comm) -> None:
    """Rank 1 skips a scatter, and goes on with the next call."""
    if comm.rank == 0:
        dist.scatter(torch.zeros(4), [torch.zeros(4)] * 2, group_src=0, group=comm.group)
    dist.all_reduce(torch.zeros(4), group=comm.group)


def longer_message(comm: Comm) -> None:
    if comm.rank == 0:
        dist.send(torch.zeros(9), group_dst=1, group=comm.group)
    else:
        dist.recv(torch.zeros(4), group_src=0, group=comm.group)


def shorter_message(comm: Comm) -> None:
    if comm.rank == 0:
        dist.send(torch.zeros(4), group_dst=1, group=comm.group)
    else:
        dist.recv(torch.zeros(9), group_src=0, group=comm.group)


def control_message(comm: Comm) -> None:
    if comm.rank == 0:
        comm.control.sum(torch.zeros(2))
    else:
        comm.control.barrier()


def make_mistake(_: Comm, mistake: Callable[[Comm], None]) -> str:
    """Make different calls on two ranks; return the error of this rank."""
    ours = open_checked(2)
    if ours is None:
        return ""
    try:
        mistake(ours)
    except RankError as error:
        return f"{error.message} {error.hint}"
    except RuntimeError as error:
        return f"lost: {error}"
    finally:
        close_comm(ours)  # The other rank, if it waits in the operation, loses the connection.
    return "nothing was found"


MISTAKES: list[tuple[Callable[[Comm], None], str, str]] = [
    (other_size, "all_reduce (float32 9, sum)", "all_reduce (float32 7, sum)"),
    (other_dtype, "broadcast (int64 4, root 0)", "broadcast (float64 4, root 0)"),
    (other_reduction, "all_reduce (float32 4, sum)", "all_reduce (float32 4, max)"),
    (other_root, "broadcast (float32 4, root 0)", "broadcast (float32 4, root 1)"),
    (other_kind, "all_reduce (float32 4, sum)", "barrier"),
    (skipped, "scatter (float32 4, root 0)", "all_reduce (float32 4, sum)"),
    (longer_message, "send (float32 9)", "recv (float32 4)"),
    (shorter_message, "send (float32 4)", "recv (float32 9)"),
    (control_message, "all_reduce (float32 2, sum)", "all_reduce (uint8 1, max)"),
]


@pytest.mark.parametrize(("mistake", "first", "second"), MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_calls_that_differ_are_named_with_both_places(
    pool: Pool, mistake: Callable[[Comm], None], first: str, second: str
) -> None:
    found: list[Any] = pool.run(make_mistake, SIZE, mistake)[:2]
    named = [error for error in found if not error.startswith("lost: ")]
    assert named, "at least the rank that comes last finds it"
    for error in named:
        assert f"rank 0 called {first} at " in error
        assert f", but rank 1 called {second} at " in error
        assert error.count("test_checked.py:") == 2 or mistake is control_message
        assert "call the same collectives on all ranks" in error
