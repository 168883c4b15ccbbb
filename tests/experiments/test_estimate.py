"""Tests of the estimate before an experiment: the trial that it makes finds a batch larger than the data."""

from __future__ import annotations

import random

import pytest

from paceline.config import CompareConfig, RunConfig, ScaleConfig
from paceline.errors import UsageError
from paceline.experiments.candidates import make_candidates
from paceline.experiments.estimate import estimate_s, run_trial
from paceline.experiments.scaling import estimate as scaling_estimate
from paceline.experiments.scaling.machines import DetectedMachines
from paceline.experiments.scaling.points import make_points
from paceline.launch.launcher_process import Shape

SMALL = RunConfig(data="synthetic:size=96,test_size=12", device="cpu", steps=8)
TOO_MANY = "is more than the 96 samples of the training data"


def test_a_batch_larger_than_the_data_is_refused_before_ranks_start() -> None:
    compare = CompareConfig(strategies="ddp,allreduce", vary=("batch=32,128",))
    candidates = make_candidates(SMALL, compare, Shape(1, 2))
    with pytest.raises(UsageError, match=f"a global batch of 128 {TOO_MANY}") as caught:
        estimate_s(candidates, 2, 1, proof=False, doctor=False)
    assert caught.value.hint == "use --batch 96 or less"


def test_a_batch_that_weak_scaling_makes_larger_than_the_data_is_refused() -> None:
    config = ScaleConfig(strategies="ddp", batch_per_rank=40)
    points = make_points(SMALL, config, [Shape(1, 1), Shape(1, 4)])
    machine = DetectedMachines(emulated=None, host_cpus=None, machine_cores=4.0, machines=[0], ranks_pinned=False)
    with pytest.raises(UsageError, match=f"a global batch of 160 {TOO_MANY}"):
        scaling_estimate.estimate_s(points, config, machine)


def test_a_trial_leaves_the_generators_of_the_launcher_alone() -> None:
    state = random.getstate()
    assert run_trial(SMALL).train_samples == 96
    assert random.getstate() == state
