"""What `scale` measures is settled, and checked, before anything starts."""

from __future__ import annotations

import pytest

from paceline.config import RunConfig, ScaleConfig
from paceline.errors import UsageError
from paceline.experiments.scaling.points import ScaleBatches, make_points
from paceline.launch.launcher_process import Shape


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
