"""Activities of compute threads in hand-made steps and in random ones, which must add up to the time split."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from paceline.analysis.steps.activity import WAITING, Activity, activities_in, step_activities
from paceline.analysis.steps.split import TimedSpan, split_steps
from paceline.records.timeline import NO_PEER, NOT_MEASURED, ROW, Purpose, RowKind, Timeline


def timeline(*rows: tuple[int, RowKind, float, float, float]) -> Timeline:
    """Return a timeline of rows (step, kind, start, end, wait start)."""
    whole = [
        (
            step,
            kind,
            Purpose.GRADIENTS if kind.is_operation else Purpose.NOTHING,
            NO_PEER,
            8,
            start,
            end,
            wait_start,
            NOT_MEASURED,
        )
        for step, kind, start, end, wait_start in rows
    ]
    return Timeline(np.sort(np.array(whole, dtype=ROW), order="start_s"))


def test_a_blocking_operation_interrupts_its_phase() -> None:
    phases = [TimedSpan(RowKind.FORWARD, 0.0, 4.0), TimedSpan(RowKind.BACKWARD, 4.0, 9.0)]
    statistics = TimedSpan(RowKind.ALL_REDUCE, 1.0, 2.0, wait_start_s=1.5)
    assert activities_in(0.0, 10.0, phases, [statistics]) == [
        Activity("forward", 0.0, 1.5),
        Activity(WAITING, 1.5, 2.0),
        Activity("forward", 2.0, 4.0),
        Activity("backward", 4.0, 9.0),
    ]


def test_operations_during_backward_are_waited_for_only_after_it() -> None:
    phases = [
        TimedSpan(RowKind.DATA, 0.0, 1.0),
        TimedSpan(RowKind.BACKWARD, 1.0, 5.0),
        TimedSpan(RowKind.OPTIMISER, 7.0, 8.0),
    ]
    buckets = [TimedSpan(RowKind.ALL_REDUCE, 3.0, 6.0), TimedSpan(RowKind.ALL_REDUCE, 4.0, 6.5)]
    assert activities_in(0.0, 8.0, phases, buckets) == [
        Activity("data", 0.0, 1.0),
        Activity("backward", 1.0, 5.0),
        Activity(WAITING, 5.0, 6.5),
        Activity("optimiser", 7.0, 8.0),
    ]


def test_an_operation_that_outlives_its_step_is_in_progress_in_the_next() -> None:
    steps = list(
        step_activities(
            timeline(
                (0, RowKind.STEP, 0.0, 5.0, NOT_MEASURED),
                (0, RowKind.FORWARD, 0.0, 5.0, NOT_MEASURED),
                (0, RowKind.ALL_REDUCE, 4.0, 6.0, NOT_MEASURED),
                (1, RowKind.STEP, 5.0, 9.0, NOT_MEASURED),
                (1, RowKind.FORWARD, 5.5, 9.0, NOT_MEASURED),
            )
        )
    )
    assert [len(step.operations) for step in steps] == [1, 1]
    assert steps[1].activities == [Activity(WAITING, 5.0, 5.5), Activity("forward", 5.5, 9.0)]


@pytest.mark.parametrize("seed", range(20))
def test_activities_do_not_overlap_and_add_up_to_the_split(seed: int) -> None:
    draw = random.Random(seed)
    rows: list[tuple[int, RowKind, float, float, float]] = []
    for step in range(3):
        times = sorted(step + draw.random() for _ in range(6))
        rows.append((step, RowKind.STEP, times[0], times[5], NOT_MEASURED))
        for number, kind in enumerate((RowKind.DATA, RowKind.FORWARD, RowKind.BACKWARD, RowKind.OPTIMISER)):
            rows.append((step, kind, times[number], times[number + 1], NOT_MEASURED))
        for _ in range(
            draw.randrange(6)
        ):  # Only after data loading, as in a run: waits during data loading cannot be distinguished.
            start, end = sorted(draw.uniform(times[1], times[5]) for _ in range(2))
            rows.append((step, RowKind.ALL_REDUCE, start, end, draw.choice([NOT_MEASURED, draw.uniform(start, end)])))
    whole = timeline(*rows)
    for step, split in zip(step_activities(whole), split_steps(whole), strict=True):
        ends = [activity.end_s for activity in step.activities]
        assert all(end <= later.start_s for end, later in zip(ends, step.activities[1:], strict=False))
        lengths = {name: 0.0 for name in ("data", WAITING)}
        for name, start_s, end_s in step.activities:
            lengths[name] = lengths.get(name, 0.0) + end_s - start_s
        assert lengths.pop(WAITING) == pytest.approx(split.split.exposed_s, abs=1e-9)
        assert lengths.pop("data") == pytest.approx(split.split.data_s, abs=1e-9)
        assert math.fsum(lengths.values()) == pytest.approx(split.split.computing_s, abs=1e-9)
