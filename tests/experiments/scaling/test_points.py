"""What `scale` measures is settled, and checked, before anything starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.config import RunConfig, ScaleConfig
from paceline.errors import UsageError
from paceline.experiments.estimate import LAUNCH_S, RUN_S, SYNCHRONISING, Trial
from paceline.experiments.scaling.estimate import estimate_from_trial
from paceline.experiments.scaling.machines import DetectedMachines
from paceline.experiments.scaling.points import ScaleBatches, make_points
from paceline.launch.launcher_process import Shape

ON_ONE_MACHINE = DetectedMachines(emulated=None, host_cpus=None, machine_cores=4.0, machines=[0], ranks_pinned=False)


@pytest.mark.parametrize(
    ("settings", "batches"),
    [
        ({}, (256, 64)),
        ({"batch": 128}, (128, 32)),
        ({"batch_per_rank": 16}, (64, 16)),
        ({"batch": 100, "batch_per_rank": 8}, (100, 8)),
        ({"batch": 2}, (2, 1)),
    ],
)
def test_where_one_batch_is_named_the_other_meets_it_on_the_most_ranks(
    settings: dict[str, int], batches: tuple[int, int]
) -> None:
    found = ScaleBatches.of(ScaleConfig(**settings), most_ranks=4)
    assert (found.whole, found.share) == batches


def test_points_have_the_batches_of_their_kind_and_share_what_is_the_same() -> None:
    config = ScaleConfig(strategies="ddp", mode="weak,strong", ranks="1,2,4")
    candidate_configs = make_points(RunConfig(steps=20), config, [Shape(1, 1), Shape(2, 1), Shape(4, 1)])
    points = [(e.candidate.strategy, e.candidate.point, e.config.batch, e.shape) for e in candidate_configs]
    assert all(point is not None and point.batch == batch for _, point, batch, _ in points)
    told = [(name, point.mode, point.ranks, point.batch) for name, point, _, _ in points if point]
    assert told == [
        ("single", "strong", 1, 256),
        ("ddp", "strong", 1, 256),
        ("single", "weak", 1, 64),
        ("ddp", "weak", 1, 64),
        ("ddp", "strong", 2, 256),
        ("ddp", "weak", 2, 128),
        ("ddp", "both", 4, 256),
    ]
    assert candidate_configs[-1].candidate.name == "ddp on 4 ranks over 4 hosts, batch 256"
    assert [e.candidate.role for e in candidate_configs[:2]] == ["baseline", "candidate"]


def test_a_batch_that_leaves_a_rank_empty_is_refused() -> None:
    with pytest.raises(UsageError, match="a global batch of 3 leaves some of the 4 ranks without a sample"):
        make_points(RunConfig(), ScaleConfig(batch=3), [Shape(1, 1), Shape(4, 1)])


def test_uneven_shares_are_told_as_they_are() -> None:
    candidate_configs = make_points(RunConfig(), ScaleConfig(strategies="ddp", batch=256), [Shape(1, 1), Shape(3, 1)])
    point = candidate_configs[-1].candidate.point
    assert point is not None
    assert point.batch_per_rank == pytest.approx(256 / 3)


def test_there_has_to_be_something_that_shares_the_work() -> None:
    with pytest.raises(UsageError, match="nothing to scale in single"):
        make_points(RunConfig(), ScaleConfig(strategies="single"), [Shape(1, 1), Shape(2, 1)])


def test_a_strategy_that_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"strategy.*dpd"):
        make_points(RunConfig(), ScaleConfig(strategies="dpd"), [Shape(1, 1)])


def test_the_estimate_knows_shares_and_links() -> None:
    config = ScaleConfig(strategies="ddp,p2p", repeats=2, proof=False, doctor=False)
    candidate_configs = make_points(RunConfig(steps=20), config, [Shape(1, 1), Shape(2, 1)])
    trial = Trial(sample_s=0.001, steps_per_epoch=6, train_samples=None, test_samples=0, gradient_bytes=1_000_000)
    wide, narrow, slow = (
        estimate_from_trial(candidate_configs, config, replace(ON_ONE_MACHINE, **place), trial, 0.001)
        for place in ({}, {"emulated": "2@8mbit"}, {"host_cpus": 0.1})
    )
    # Twice: starting ranks of two shapes, five runs of 20 steps of 256 samples, two of which have two cores.
    assert wide == pytest.approx(2 * (2 * LAUNCH_S + 5 * RUN_S + 20 * 0.256 * SYNCHRONISING * (3 + 2 / 2)))
    assert narrow - wide == pytest.approx(2 * 20 * (1 + 2) * 1514 / 1448), "1 MB a second, once or twice a step"
    assert slow > 5 * wide
