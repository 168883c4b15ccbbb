"""Guesses before an experiment: from a trial, which also finds a batch larger than the data."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.analysis.remaining_time import Part
from paceline.config import CompareConfig, RunConfig, ScaleConfig
from paceline.errors import UsageError
from paceline.experiments.candidates import CandidateConfig, make_candidates
from paceline.experiments.estimate import (
    LAUNCH_S,
    RUN_S,
    SYNCHRONISING,
    Trial,
    guess_times,
    launch_part,
    load_slowdowns,
    run_trial,
    run_trials,
)
from paceline.experiments.scaling.machines import DetectedMachines
from paceline.experiments.scaling.points import make_points
from paceline.experiments.training_targets import WorkloadTarget
from paceline.launch.launcher_process import Shape
from paceline.measure.cores import affine_cores

SMALL = RunConfig(data="synthetic:size=96,test_size=12", device="cpu", steps=8)
TOO_MANY = "is more than the 96 samples of the training data"


def test_a_batch_larger_than_the_data_is_refused_before_ranks_start() -> None:
    compare = CompareConfig(strategies="ddp,allreduce", vary=("batch=32,128",))
    candidates = make_candidates(SMALL, compare, Shape(1, 2))
    with pytest.raises(UsageError, match=f"a global batch of 128 {TOO_MANY}") as caught:
        run_trials(candidates)
    assert caught.value.hint == "use --batch 96 or less"


def test_a_batch_that_weak_scaling_makes_larger_than_the_data_is_refused() -> None:
    config = ScaleConfig(strategies="ddp", batch_per_rank=40)
    points = make_points(SMALL, config, [Shape(1, 1), Shape(1, 4)])
    with pytest.raises(UsageError, match=f"a global batch of 160 {TOO_MANY}"):
        run_trials(points)


def test_a_trial_leaves_the_generators_of_the_launcher_alone() -> None:
    state = random.getstate()
    assert run_trial(SMALL).train_samples == 96
    assert random.getstate() == state


@pytest.mark.parametrize("tick_s", [0.02, 1e9])
def test_a_clock_of_cpu_time_may_be_coarse(monkeypatch: pytest.MonkeyPatch, tick_s: float) -> None:
    """Under `ulimit -t`, Linux counts it in ticks, so a pass may seem to take no time."""
    exact = time.process_time
    expected = run_trial(SMALL).sample_cpu_s
    monkeypatch.setattr(time, "process_time", lambda: exact() // tick_s * tick_s)
    trial = run_trial(SMALL)
    if tick_s > 1:
        assert (trial.sample_cpu_s, trial.threads_slowdown) == (0, 1)
    else:
        assert expected / 5 < trial.sample_cpu_s < 5 * expected


ON_ONE_MACHINE = DetectedMachines(emulated=None, host_cpus=None, machine_cores=4.0, machines=[0, 0], ranks_pinned=False)
TRIAL = Trial(
    sample_cpu_s=0.001, steps_per_epoch=6, batch=256, train_samples=None, test_samples=0, gradient_bytes=1_000_000
)


def guessed(candidates: Sequence[CandidateConfig], trial: Trial, threads: int = 1, **place: Any) -> dict[Part, float]:
    trials = {one.candidate.name: trial for one in candidates}
    return guess_times(candidates, trials, replace(ON_ONE_MACHINE, **place), lambda _: threads)


def test_guesses_know_shares_and_links() -> None:
    config = ScaleConfig(strategies="ddp,p2p")
    points = make_points(RunConfig(steps=20), config, [Shape(1, 1), Shape(2, 1)])
    wide, narrow, slow, threaded = (
        guessed(points, TRIAL),
        guessed(points, TRIAL, emulated="2@8mbit"),
        guessed(points, TRIAL, host_cpus=0.1),
        guessed(points, TRIAL, threads=2),
    )
    alone, two = Part("run", "single on 1 rank, batch 256"), Part("run", "p2p on 2 ranks over 2 hosts, batch 256")
    assert wide[launch_part(Shape(2, 1))] == LAUNCH_S
    assert wide[alone] == pytest.approx(RUN_S + 20 * 0.256 * SYNCHRONISING)
    assert wide[two] == pytest.approx(RUN_S + 20 * 0.256 * SYNCHRONISING / 2), "on two cores"
    assert threaded[two] == pytest.approx(RUN_S + 20 * 0.256 * SYNCHRONISING / 4)
    assert narrow[two] - wide[two] == pytest.approx(2 * 20 * 1514 / 1448), "1 MB a second, twice a step"
    assert narrow[alone] == wide[alone]
    assert slow[alone] > 5 * wide[alone]


def test_a_load_slows_down_ranks_of_several_threads_most() -> None:
    compare = CompareConfig(strategies="single,allreduce")
    alone, two = make_candidates(RunConfig(steps=20), compare, Shape(1, 2))
    threads = {"single": 2, "allreduce": 1}

    def slowdowns(observed: float, *averages: float) -> dict[Part, float]:
        trial = replace(TRIAL, other_cores=observed * affine_cores(), threads_slowdown=30.0)
        loads = [load * (os.cpu_count() or 1) for load in averages]
        trials = {one.candidate.name: trial for one in (alone, two)}
        return load_slowdowns(
            [alone, two], trials, lambda one: threads[one.candidate.name], lambda: (loads[0], loads[1], 0.0)
        )

    found = slowdowns(2.0, 1.0, 9.0)
    assert found[Part("run", "single")] == found[Part("proof", "single")] == 30.0
    assert found[Part("run", "allreduce")] == found[launch_part(Shape(1, 2))] == pytest.approx(3.0)
    assert Part("examination") not in found
    assert slowdowns(40.0, 1.0, 2.0)[Part("run", "allreduce")] == pytest.approx(3.0), "one moment is not the rule"
    assert slowdowns(0.0, 4.0, 1.0)[Part("run", "allreduce")] == pytest.approx(2.0)
    assert slowdowns(0.0, 0.0, 4.0)[Part("run", "allreduce")] == 1.0, "a load that has ended"
    assert load_slowdowns([alone, two], {}, lambda _: 1) == {}


def test_guesses_follow_the_batch_the_slowest_rank_and_the_time_limit() -> None:
    base = RunConfig(epochs=2, batch=128)
    compare = CompareConfig(strategies="allreduce", vary=("slow_rank=,1:3",))
    even, slowed = make_candidates(base, compare, Shape(1, 2))
    found = guessed([even, slowed], TRIAL)
    run, slow = (found[Part("run", one.candidate.name)] - RUN_S for one in (even, slowed))
    assert run == pytest.approx(2 * 12 * 0.128 * SYNCHRONISING / 2), "half the batch, twice the steps"
    assert slow == pytest.approx(3 * run)
    (limited,) = make_candidates(replace(base, seconds=0.25), CompareConfig(strategies="allreduce"), Shape(1, 2))
    assert guessed([limited], TRIAL)[Part("run", limited.candidate.name)] == RUN_S + 0.25


@pytest.mark.parametrize(
    ("changes", "evaluations"),
    [
        ({"steps": 20}, 1),
        ({"steps": 20, "eval_every": "5"}, 4),
        ({"steps": 20, "eval_every": "6"}, 4),
        ({"epochs": 3, "eval_every": "epoch"}, 3),
        ({"steps": 20, "evaluate": False}, 0),
    ],
)
def test_guesses_count_evaluations(changes: dict[str, Any], evaluations: int) -> None:
    tested = replace(TRIAL, test_samples=300 if changes.get("evaluate", True) else 0)
    (one,) = make_candidates(RunConfig(**changes), CompareConfig(strategies="allreduce"), Shape(1, 2))
    part = Part("run", one.candidate.name)
    training_s = guessed([one], replace(TRIAL, test_samples=0))[part]
    assert guessed([one], tested)[part] - training_s == pytest.approx(evaluations * 300 / 3 * TRIAL.sample_cpu_s / 2)


def test_guesses_count_the_evaluations_within_a_time() -> None:
    tested = replace(TRIAL, test_samples=300)
    base = RunConfig(epochs=100, seconds=10.0 * 0.256 * SYNCHRONISING / 2, eval_every="5")
    (one,) = make_candidates(base, CompareConfig(strategies="allreduce"), Shape(1, 2))
    part = Part("run", one.candidate.name)
    evaluating_s = guessed([one], tested)[part] - guessed([one], replace(TRIAL, test_samples=0))[part]
    assert evaluating_s == pytest.approx(2 * 300 / 3 * TRIAL.sample_cpu_s / 2), "10 steps in that time"


def test_the_default_batch_is_reduced_to_the_data() -> None:
    candidates = make_candidates(SMALL, CompareConfig(strategies="ddp,allreduce"), Shape(1, 2))
    known = WorkloadTarget().describe(candidates, 2)
    assert known.batch == 96
    assert {trial.batch for trial in known.trials.values()} == {96}
