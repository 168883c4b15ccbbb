"""Time splits of hand-made timelines with known results."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.timelines import FIRST, operation, phase, timeline
from paceline.analysis.steps.split import PARTS, mean_split, split_of, split_steps
from paceline.records.summary import Split
from paceline.records.timeline import ROW, Purpose, RowKind, Timeline

Row = tuple[Any, ...]


def split(*rows: Row) -> Split:
    """Return the split of the only step."""
    (step,) = split_steps(timeline(*rows))
    return step.split


def parts(found: Split) -> tuple[float, ...]:
    """Return compute, overlapped, exposed and other."""
    return tuple(pytest.approx(getattr(found, f"{part}_s")) for part in PARTS)


def phases(*ends: float, start_s: float = 0.0, step: int = FIRST) -> list[Row]:
    """Return data, forward, backward and, given 5 ends, an optimiser phase from the fourth to the fifth."""
    kinds = (RowKind.DATA, RowKind.FORWARD, RowKind.BACKWARD)
    starts = [start_s, *ends[:2]]
    rows = [phase(kind, begin, end, step=step) for kind, begin, end in zip(kinds, starts, ends[:3], strict=True)]
    return [*rows, phase(RowKind.OPTIMISER, ends[3], ends[4], step=step)] if len(ends) > 3 else rows


def reduce_from(start_s: float, end_s: float, wait_start_s: float = math.nan, step: int = FIRST) -> Row:
    return operation(RowKind.ALL_REDUCE, start_s, end_s, 100, wait_start_s=wait_start_s, step=step)


ALONE = phases(1, 3, 7, 7, 8)
"""1 s of data, 2 s of forward, 4 s of backward, 1 s of the optimiser."""


def test_a_rank_that_trains_alone() -> None:
    found = split(*ALONE)
    assert parts(found) == (7, 0, 0, 1)
    assert (found.step_s, found.data_s, found.computing_s, found.communication_s) == (8, 1, 7, 0)
    assert found.overlap is None, "nothing was sent"


def test_synchronisation_after_backward() -> None:
    """Two blocking all-reduces, and 0.5 s of arithmetic between them and the optimiser."""
    found = split(*phases(1, 3, 7, 9.5, 10), reduce_from(7, 8, 7), reduce_from(8, 9, 8))
    assert parts(found) == (6.5, 0, 2, 1.5)
    assert found.overlap == 0


def test_ddp_overlaps_one_bucket_and_exposes_the_end_of_the_other() -> None:
    """Backward computes until 7; buckets are transferred from 4 to 6 and from 6.5 to 9; the optimiser starts at 9."""
    found = split(*phases(1, 3, 7, 9, 10), reduce_from(4, 6), reduce_from(6.5, 9))
    assert parts(found) == (2 + 1 + 0.5 + 1, 2.5, 2, 1)
    assert found.overlap == pytest.approx(2.5 / 4.5)
    assert found.share("exposed") == pytest.approx(0.2)


def test_buckets_that_queue_count_once() -> None:
    """A bucket starts when it is enqueued: overlapping buckets count only once."""
    found = split(*phases(1, 3, 7, 9, 10), reduce_from(4, 6), reduce_from(4.5, 9))
    assert found.communication_s == pytest.approx(5)
    assert parts(found) == (1 + 2 + 1, 3, 2, 1)


def test_waiting_for_a_straggler_is_exposed_communication() -> None:
    on_time = split(*phases(1, 3, 7, 9, 10), reduce_from(6.5, 9))
    late = split(*phases(1, 3, 7, 109, 110), reduce_from(6.5, 109))
    assert late.exposed_s - on_time.exposed_s == pytest.approx(100)
    assert late.computing_s == on_time.computing_s
    assert late.other_s == on_time.other_s


def test_a_wait_inside_forward_is_not_compute() -> None:
    """Buffers are broadcast before the first layer; batch statistics are exchanged in the middle."""
    buffers = operation(RowKind.BROADCAST, 1, 1.5, 10, purpose=Purpose.BUFFERS, wait_start_s=1)
    statistics = operation(RowKind.ALL_GATHER, 2, 2.25, 10, purpose=Purpose.STATISTICS, wait_start_s=2)
    found = split(*ALONE, buffers, statistics)
    assert parts(found) == (6.25, 0, 0.75, 1)
    assert found.overlap == 0


def test_a_wait_inside_backward_is_not_compute() -> None:
    """Two all-reduces that block inside a hook, as under `ddp:overlap=false`, followed by more of backward."""
    found = split(*phases(1, 3, 7, 7, 8), reduce_from(5, 6, 5), reduce_from(6, 6.5, 6))
    assert parts(found) == (5.5, 0, 1.5, 1)


def test_an_operation_is_overlapped_until_it_is_waited_for() -> None:
    found = split(*ALONE, reduce_from(3, 6, wait_start_s=5))
    assert parts(found) == (4, 2, 1, 1)
    assert found.overlap == pytest.approx(2 / 3)


def test_waiting_for_one_operation_does_not_overlap_another() -> None:
    found = split(*ALONE, reduce_from(3, 6), operation(RowKind.RECV, 4, 5, 8, wait_start_s=4))
    assert parts(found) == (4, 2, 1, 1)


def test_micro_batches() -> None:
    """Two micro-batches with data, forward and backward each; DDP sends during the last backward."""
    rows = [
        *phases(1, 2, 3),
        *phases(4, 5, 8, 9, 10, start_s=3),
        phase(RowKind.STEP, 0, 10),
        reduce_from(7, 9),
    ]
    found = split(*rows)
    assert parts(found) == (2 + 1 + 2 + 1, 1, 1, 2)
    assert found.data_s == 2


def test_an_operation_that_outlives_its_step_counts_in_both() -> None:
    """A strategy that leaves work in flight: sent at the end of one step, waited for in the next."""
    first = [phase(RowKind.STEP, 0, 10), phase(RowKind.FORWARD, 0, 10)]
    second = [phase(RowKind.STEP, 11, 20, step=FIRST + 1), phase(RowKind.FORWARD, 11, 20, step=FIRST + 1)]
    one, other = split_steps(timeline(*first, *second, reduce_from(8, 14, wait_start_s=13)))
    assert (one.step, other.step) == (FIRST, FIRST + 1)
    assert parts(one.split) == (8, 2, 0, 0)
    assert parts(other.split) == (6, 2, 1, 0)


def test_an_operation_longer_than_many_steps_counts_in_all_of_them() -> None:
    steps = [phase(RowKind.STEP, start, start + 1, step=FIRST + start) for start in range(5)]
    found = split_steps(timeline(*steps, reduce_from(0.5, 4.5), reduce_from(2, 2.1)))
    assert [step.split.exposed_s for step in found] == [0.5, 1, 1, 1, 0.5]


def test_waits_of_the_previous_step_do_not_affect_this_one() -> None:
    first = [phase(RowKind.STEP, 0, 10), phase(RowKind.FORWARD, 0, 5)]
    second = [phase(RowKind.STEP, 10, 20, step=FIRST + 1), phase(RowKind.FORWARD, 10, 20, step=FIRST + 1)]
    found = split_steps(timeline(*first, *second, reduce_from(6, 10, wait_start_s=6)))
    assert [step.split.exposed_s for step in found] == [4, 0]
    assert found[1].split.compute_s == 10


def test_descheduled_time_is_wall_time_minus_cpu_time_of_compute() -> None:
    """Backward took 4 s with 3 s of CPU time; 1 s of the forward pass was a wait without CPU time."""
    rows = [
        phase(RowKind.DATA, 0, 1, cpu_s=0.1),
        phase(RowKind.FORWARD, 1, 3, cpu_s=1.0),
        phase(RowKind.BACKWARD, 3, 7, cpu_s=3.0),
        phase(RowKind.OPTIMISER, 7, 8, cpu_s=1.0),
    ]
    assert split(*rows, reduce_from(1, 2, wait_start_s=1)).descheduled_s == pytest.approx(1)
    busy = [row if row[1] != RowKind.BACKWARD else phase(RowKind.BACKWARD, 3, 7, cpu_s=4.001) for row in rows]
    assert split(*busy, reduce_from(1, 2, wait_start_s=1)).descheduled_s == 0, "two clocks never agree exactly"
    assert split(*ALONE).descheduled_s is None, "unknown on a GPU"


times = st.floats(0, 10).map(lambda time_s: round(time_s, 3))


@st.composite
def any_rows(draw: st.DrawFn) -> list[Row]:
    """Draw consecutive phases, and operations anywhere, also before and after the step."""
    ends = sorted(draw(st.lists(times, min_size=6, max_size=6)))
    rows = [phase(RowKind.STEP, 2, 8), *phases(*ends[1:], start_s=ends[0])]
    for start, end in draw(st.lists(st.tuples(times, times), max_size=6)):
        begin, finish = min(start, end), max(start, end)
        waited = draw(st.none() | st.floats(0, 1))
        rows.append(reduce_from(begin, finish, math.nan if waited is None else begin + waited * (finish - begin)))
    return rows


@given(any_rows())
def test_the_parts_always_add_up(rows: list[Row]) -> None:
    found = split(*rows)
    assert all(getattr(found, f"{part}_s") >= 0 for part in PARTS)
    assert sum(getattr(found, f"{part}_s") for part in PARTS) == pytest.approx(found.step_s) == 6
    on_wire = [(row[5], row[6]) for row in rows if row[1] == RowKind.ALL_REDUCE]
    grid = [2 + (number + 0.5) / 1000 for number in range(6000)]
    expected = sum(any(start < point < end for start, end in on_wire) for point in grid) / 1000
    assert found.communication_s == pytest.approx(expected, abs=0.02)


def test_means_add_up_and_exclude_the_warm_up() -> None:
    warm_up = [phase(RowKind.STEP, 0, 100, step=0), phase(RowKind.FORWARD, 0, 100, step=0, cpu_s=1.0)]
    later = [
        phase(RowKind.STEP, 100, 110),
        phase(RowKind.FORWARD, 100, 106, cpu_s=6.0),
        reduce_from(104, 108),
        phase(RowKind.STEP, 110, 130, step=FIRST + 1),
        phase(RowKind.FORWARD, 110, 130, step=FIRST + 1, cpu_s=10.0),
    ]
    found = split_of(timeline(*warm_up, *later))
    assert found is not None
    assert found == Split(
        step_s=15, compute_s=12, overlapped_s=1, exposed_s=1, other_s=1, data_s=0, descheduled_s=pytest.approx(5)
    )
    only_first = split_of(timeline(*warm_up))
    assert only_first is not None
    assert only_first.step_s == 100, "the only step"
    without = split_of(timeline(*warm_up, *later), without={FIRST + 1})
    assert without is not None
    assert without.step_s == 10
    assert split_of(Timeline(np.empty(0, ROW))) is None
    assert split_of(Timeline(timeline(reduce_from(0, 1)).operations)) is None, "operations without a step"


def test_mean_descheduled_time_needs_all_steps() -> None:
    known = Split(
        step_s=1.0, compute_s=1.0, overlapped_s=0.0, exposed_s=0.0, other_s=0.0, data_s=0.0, descheduled_s=0.5
    )
    mean = mean_split([known, msgspec.structs.replace(known, descheduled_s=None)])
    assert mean is not None
    assert mean.descheduled_s is None
