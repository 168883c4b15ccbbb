"""Small values that ranks exchange over the control channel: results, and what is recorded of them in a step."""

from __future__ import annotations

import time
from typing import Any

import torch

from comm.groups.test_timed import open_timed, rows_of
from paceline.comm import Comm, close_comm, open_comm
from paceline.records.timeline import Purpose, RowKind
from ranks import SIZE, Pool

LATE_S = 0.2


def agree_in_a_step(_: Comm) -> list[Any] | None:
    comm = open_timed(2)
    if comm is None:
        return None
    rank, control = comm.rank, comm.control

    def agree() -> None:
        assert control.sum(torch.ones(3, dtype=torch.float64)).tolist() == [2, 2, 2]
        assert control.smallest(rank) == 0
        assert control.largest(rank) == 1
        assert control.any_of(torch.tensor([rank == 1, False], dtype=torch.uint8)).tolist() == [1, 0]
        control.barrier()
        assert control.gather(torch.tensor(rank)) == [torch.tensor(0), torch.tensor(1)]

    agree()
    rows = rows_of(comm, agree)
    close_comm(comm)
    return [(RowKind(row[1]), Purpose(row[2]), row[4]) for row in rows if row[7] == row[5]]


def test_agreement_in_a_step_is_recorded(pool: Pool) -> None:
    sizes = [3 * 8, 8, 8, 2, 1]
    expected = [(RowKind.ALL_REDUCE, Purpose.CONTROL, size) for size in sizes]
    expected.append((RowKind.ALL_GATHER, Purpose.CONTROL, 2 * 8))
    assert pool.run(agree_in_a_step, SIZE)[:2] == [expected] * 2


def wait_for_a_late_rank(comm: Comm) -> float:
    comm.control.barrier()
    start_s = time.monotonic()
    time.sleep(LATE_S * comm.rank)
    comm.control.barrier()
    return time.monotonic() - start_s


def test_nobody_passes_a_barrier_before_the_last_rank(pool: Pool) -> None:
    assert min(pool.run(wait_for_a_late_rank, 2)) > 0.9 * LATE_S


SHORT_S = 0.5
"""Time-out of a group."""


def long_work(comm: Comm) -> tuple[str | None, bool]:
    """Return the result of work that takes longer than the time-out of a group, and whether failed work is noticed."""
    short = open_comm(range(comm.world_size), device=comm.device, backend="gloo", timeout_s=SHORT_S)
    assert short is not None
    control = short.control

    def work() -> str:
        time.sleep(2 * SHORT_S)
        return "done"

    def fail() -> str:
        raise ValueError("no disk")

    result = control.while_others_wait(work)
    try:
        control.while_others_wait(fail)
    except ValueError:
        assert comm.rank == 0
    still_works = control.smallest(comm.rank) == 0
    close_comm(short)
    return result, still_works


def test_ranks_wait_for_rank_0_longer_than_the_time_out(pool: Pool) -> None:
    assert pool.run(long_work, SIZE) == [("done", True), (None, True), (None, True), (None, True)]
