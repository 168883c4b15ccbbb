"""RankActivity of a rank, as the watchdog sees it."""

from __future__ import annotations

import torch

from paceline.measure.activity import RankActivity
from paceline.measure.steps import AGREE, BACKWARD, DATA, FORWARD, OPTIMISER, make_stopwatch
from paceline.records.timeline import NO_PEER, RowKind

CPU = torch.device("cpu")


def test_phases_of_a_step() -> None:
    activity, stopwatch = RankActivity(), make_stopwatch(CPU, events=False)
    assert (activity.phase, activity.step) == ("starting", None)
    activity.follow(stopwatch)
    found, progress = [activity.phase], [activity.progress]
    stopwatch.begin()
    for phase in (DATA, FORWARD, BACKWARD, AGREE, OPTIMISER):
        found.append(activity.phase)
        progress.append(activity.progress)
        stopwatch.lap(phase)
    stopwatch.end()
    found.append(activity.phase)
    progress.append(activity.progress)
    assert found == [
        "between steps",
        "loading data",
        "in the forward pass",
        "in the backward pass",
        "synchronising gradients",
        "in the optimiser",
        "between steps",
    ]
    assert len({*progress}) == len(progress) - 1, "every phase is progress; the first step has begun nothing"
    assert activity.step == 1


def test_what_happens_between_steps() -> None:
    activity, stopwatch = RankActivity(), make_stopwatch(CPU, events=True)
    activity.follow(stopwatch)
    with activity.doing("in the evaluation"):
        before = activity.progress
        assert activity.phase == "in the evaluation"
        log = stopwatch.operations
        assert log is not None
        operation = log.start(RowKind.ALL_REDUCE, 8, NO_PEER)
        assert activity.operation() is operation, "operations outside of steps are known while they are in progress"
        assert activity.progress != before
        log.end(operation)
    assert activity.phase == "between steps"
    assert activity.operation() is None
    activity.reset("preparing the run")
    assert (activity.phase, activity.step) == ("preparing the run", None)


def test_a_loop_without_a_stopwatch() -> None:
    activity, steps = RankActivity(), [0]
    activity.follow_count(lambda: steps[0])
    before = activity.progress
    steps[0] = 4
    assert activity.progress != before
    assert (activity.step, activity.phase, activity.operation()) == (4, "", None)
