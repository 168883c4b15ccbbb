"""Points of an experiment over batch sizes: strategies by ranks, and sizes that do not fit."""

from __future__ import annotations

import pytest

from paceline.config import BatchConfig, RunConfig
from paceline.errors import UsageError
from paceline.experiments.batch_sizes.points import choose_batch_shapes, make_batch_points, without_too_large
from paceline.launch.launcher_process import LauncherProcess, Shape

SHAPES = [Shape(1, 1), Shape(1, 2), Shape(1, 4)]


def test_one_rank_trains_as_single_and_several_with_the_strategies() -> None:
    points = make_batch_points(RunConfig(), BatchConfig(sizes="64,32", strategies="ring,ddp"), SHAPES[:2])
    assert [one.candidate.name for one in points.candidate_configs] == [
        "single on 1 rank, batch 32",
        "single on 1 rank, batch 64",
        *[f"{name} on 2 ranks, batch {size}" for size in (32, 64) for name in ("ring", "ddp")],
    ]
    assert [one.config.batch for one in points.candidate_configs[:2]] == [32, 64]
    assert {one.candidate.point and one.candidate.point.mode for one in points.candidate_configs} == {"batch"}
    assert points.shapes == SHAPES[:2]


def test_the_strategy_of_a_run_is_used_too() -> None:
    points = make_batch_points(RunConfig(strategy="ring"), BatchConfig(sizes="32"), SHAPES[:2])
    assert [one.candidate.strategy for one in points.candidate_configs] == ["single", "ring"]
    with pytest.raises(UsageError, match="--strategy and --strategies were both given"):
        make_batch_points(RunConfig(strategy="ring"), BatchConfig(strategies="ddp"), SHAPES)


def test_sizes_per_rank_grow_with_the_ranks() -> None:
    points = make_batch_points(RunConfig(), BatchConfig(sizes="16", per_rank=True), SHAPES)
    assert [one.config.batch for one in points.candidate_configs] == [16, 32, 64]


def test_a_size_smaller_than_the_ranks_is_left_out_with_a_note() -> None:
    points = make_batch_points(RunConfig(), BatchConfig(sizes="1,2,32"), SHAPES)
    batches = [(one.shape.ranks, one.config.batch) for one in points.candidate_configs]
    assert batches == [(1, 1), (1, 2), (1, 32), (2, 2), (2, 32), (4, 32)]
    assert points.left_out == [
        "A batch of 1 is not measured on 2 ranks: some would have no sample.",
        "Batches of 1 and 2 are not measured on 4 ranks: some would have no sample.",
    ]
    with pytest.raises(UsageError, match="A batch of 2 is not measured on 4 ranks: some would have no sample"):
        make_batch_points(RunConfig(), BatchConfig(sizes="2"), SHAPES[2:])
    (note,) = make_batch_points(RunConfig(accumulate=8), BatchConfig(sizes="16,32"), SHAPES[2:]).left_out
    assert note == "A batch of 16 is not measured on 4 ranks × 8 micro-batches: some would have no sample."


def test_a_size_larger_than_the_data_is_left_out_with_a_note() -> None:
    points = make_batch_points(RunConfig(), BatchConfig(sizes="32,64,128"), SHAPES[:2])
    kept = without_too_large(points, 100)
    assert {one.config.batch for one in kept.candidate_configs} == {32, 64}
    assert kept.left_out == ["A global batch of 128 is not measured: the training data has 100 samples."]
    assert without_too_large(points, 128) is points
    assert without_too_large(points, None) is points
    with pytest.raises(UsageError, match="a global batch of 32 is more than the 8 samples") as caught:
        without_too_large(points, 8)
    assert caught.value.hint == "use smaller --sizes"


def test_a_strategy_of_one_process_has_nothing_to_measure_on_several_ranks() -> None:
    with pytest.raises(UsageError, match="there is nothing to measure on several ranks in single"):
        make_batch_points(RunConfig(strategy="single"), BatchConfig(), SHAPES[1:])
    points = make_batch_points(RunConfig(strategy="single"), BatchConfig(sizes="32"), SHAPES[:1])
    assert [one.candidate.name for one in points.candidate_configs] == ["single on 1 rank, batch 32"]


def test_one_rank_is_measured_only_if_named() -> None:
    launcher = LauncherProcess(launchers=1)
    assert choose_batch_shapes(BatchConfig(ranks="2,4"), launcher, on_one_host=2) == [Shape(1, 2), Shape(1, 4)]
    assert choose_batch_shapes(BatchConfig(), launcher, on_one_host=2) == [Shape(1, 1), Shape(1, 2)]


@pytest.mark.parametrize("sizes", ["", "0", "x"])
def test_sizes_that_cannot_be_measured_are_refused(sizes: str) -> None:
    with pytest.raises(UsageError, match="--sizes"):
        BatchConfig(sizes=sizes)
