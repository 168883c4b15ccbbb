"""Every figure of an experiment over batch sizes, against numbers that were computed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from batch_on_disk import RunEnds, read_batch_sizes, write_batch_sizes
from examinations import examination
from experiments_on_disk import write_experiment
from paceline.analysis.batch.points import BatchPoint, BatchSizes
from paceline.analysis.batch.sizes import batch_sizes
from paceline.analysis.record_set import collect_records
from paceline.analysis.statistics import Estimate
from paceline.errors import RecordError
from paceline.records.examination import write_examination
from paceline.records.experiment.record import read_experiment


def at(found: BatchSizes, strategy: str, size: int) -> BatchPoint:
    (point,) = [point for point in found.points if (point.strategy, point.size) == (strategy, size)]
    return point


def value(estimate: Estimate | None) -> float:
    assert estimate is not None
    return estimate.value


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> BatchSizes:
    """Batches of 64 and 128 on one rank and on two, trained for two epochs, with an examination of the link."""
    path = write_batch_sizes(tmp_path_factory.mktemp("batch") / "e")
    write_examination(path, examination())
    return read_batch_sizes(path)


def test_time_per_epoch_with_and_without_data(found: BatchSizes) -> None:
    for strategy, size, epoch_s in (("single", 64, 1.0), ("single", 128, 0.8), ("ddp", 64, 0.8), ("ddp", 128, 0.5)):
        point = at(found, strategy, size)
        assert point.epoch_is_measured
        assert value(point.epoch_s) == pytest.approx(epoch_s), "the second epoch; the first takes twice as long"
        assert value(point.epoch_data_s) == pytest.approx(0.1 * epoch_s)
        assert value(point.epoch_without_data_s) == pytest.approx(0.9 * epoch_s)


def test_an_epoch_is_extrapolated_from_the_step_in_a_short_run(tmp_path: Path) -> None:
    point = at(read_batch_sizes(write_batch_sizes(tmp_path / "e", trains=False)), "ddp", 64)
    assert not point.epoch_is_measured
    assert value(point.epoch_s) == pytest.approx(10 * 0.08), "10 steps of 64 are 640 samples"
    assert value(point.epoch_without_data_s) == pytest.approx(10 * (0.08 - 0.008))
    assert (point.end_loss, point.equal_time_loss, point.row.test_accuracy) == (None, None, None)


def test_throughput_and_speed_up(found: BatchSizes) -> None:
    rates = {(point.strategy, point.size): point.rate for point in found.points}
    assert rates == {
        ("single", 64): pytest.approx(640),
        ("single", 128): pytest.approx(800),
        ("ddp", 64): pytest.approx(800),
        ("ddp", 128): pytest.approx(1280),
    }
    assert at(found, "single", 64).over_fewest is None
    gain = at(found, "ddp", 128).over_fewest
    assert gain is not None
    assert (gain.baseline, gain.speed_up.value) == ("single on 1, batch 128", pytest.approx(1.6))
    assert value(at(found, "ddp", 64).speed_up) == pytest.approx(1.25)
    assert value(at(found, "ddp", 128).over_smallest) == pytest.approx(1.6)
    assert value(at(found, "single", 64).over_smallest) == 1


def test_computation_and_communication_per_epoch(found: BatchSizes) -> None:
    """Rank 0 computes 78% of a step and communicates 30%, 10% at once; rank 1 80%, 28% and 10%."""
    point = at(found, "ddp", 128)
    assert value(point.epoch_computing_s) == pytest.approx(0.5 * 0.79)
    assert value(point.epoch_communicating_s) == pytest.approx(0.5 * 0.29)
    assert value(point.epoch_exposed_s) == pytest.approx(0.5 * 0.19)
    alone = at(found, "single", 64)
    assert value(alone.epoch_computing_s) == pytest.approx(0.98)
    assert value(alone.epoch_communicating_s) == 0


def test_bandwidth_utilisation(found: BatchSizes) -> None:
    """An all-reduce of 4,000 bytes takes 28% of a step on the rank that comes last; on 2 ranks busbw is algbw."""
    measured = examination().link
    assert measured is not None
    point = at(found, "ddp", 128)
    assert point.utilisation == pytest.approx(4000 / (0.28 * 0.1) / measured.bytes_per_s)
    assert point.link_share == pytest.approx(4000 / (0.29 * 0.1) / measured.bytes_per_s)
    assert (at(found, "single", 64).utilisation, at(found, "single", 64).link_share) == (None, None)


def test_use_of_processors_and_memory(found: BatchSizes) -> None:
    """One core has a peak of 1 GFLOP/s, a sample takes 1 MFLOP, and all points use two cores."""
    assert value(at(found, "single", 64).flop_per_s) == pytest.approx(640e6)
    assert value(at(found, "single", 64).mfu) == pytest.approx(0.32)
    assert value(at(found, "ddp", 128).mfu) == pytest.approx(0.64)
    assert (value(at(found, "single", 64).cpu_cores), value(at(found, "single", 64).cpu_share)) == (1.5, 0.75)
    assert value(at(found, "ddp", 64).cpu_cores) == pytest.approx(1.9)
    assert value(at(found, "ddp", 64).cpu_share) == pytest.approx(0.95)
    assert at(found, "ddp", 64).row.peak_bytes == 400_000_001


def test_loss_and_accuracy_at_equal_epochs(found: BatchSizes) -> None:
    """The last epoch has two windows: of equal length at batch 64, of 2 and 3 steps at batch 128."""
    assert value(at(found, "single", 64).end_loss) == pytest.approx((0.8 + 0.4) / 2)
    assert value(at(found, "single", 64).end_accuracy) == pytest.approx((0.625 + 0.75) / 2)
    assert value(at(found, "ddp", 128).end_loss) == pytest.approx((2 * 0.8 + 3 * 0.4) / 5)
    assert value(at(found, "ddp", 128).end_accuracy) == pytest.approx((2 * 0.625 + 3 * 0.75) / 5)
    assert value(at(found, "ddp", 128).row.test_accuracy) == 0.91


def test_loss_and_accuracy_at_equal_time(found: BatchSizes) -> None:
    """ddp with batch 128 ends first, after 2 × 0.5 s + 0.5 s; the others have then trained their first window."""
    assert value(found.equal_time_s) == pytest.approx(1.5)
    fastest = at(found, "ddp", 128)
    assert value(fastest.equal_time_loss) == pytest.approx(value(fastest.end_loss))
    assert value(fastest.equal_time_accuracy) == pytest.approx(value(fastest.end_accuracy))
    for strategy, size in (("single", 64), ("single", 128), ("ddp", 64)):
        assert value(at(found, strategy, size).equal_time_loss) == 2.0
        assert value(at(found, strategy, size).equal_time_accuracy) == 0.25


def test_the_fastest_size_and_where_it_stops_paying(found: BatchSizes) -> None:
    best = {curve.ranks: (curve.best and curve.best.size, curve.enough and curve.enough.size) for curve in found.curves}
    assert best == {1: (128, 128), 2: (128, 128)}
    assert found.best is at(found, "ddp", 128)
    difference = found.accuracy_difference(at(found, "ddp", 64), at(found, "ddp", 128))
    assert value(difference) == pytest.approx(0.05)
    accurate = found.most_accurate(found.curves[1])
    assert accurate is at(found, "ddp", 64)


def test_a_smaller_size_is_enough_within_five_per_cent(tmp_path: Path) -> None:
    """All sizes are equally fast if the time per sample is constant."""
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e", sizes=(32, 160), ranks=(2,), trains=False))
    (curve,) = found.curves
    assert curve.enough is not None
    assert curve.enough.size == 32


def test_a_point_without_memory_does_not_affect_the_others(tmp_path: Path) -> None:
    path = write_batch_sizes(tmp_path / "e", sizes=(64, 128, 160), out_of_memory=["single on 1, batch 160"])
    found = read_batch_sizes(path)
    failed = at(found, "single", 160)
    assert failed.out_of_memory
    assert (failed.epoch_s, failed.mfu, failed.over_fewest, failed.rate) == (None, None, None, 0.0)
    assert found.curves[0].first_without_memory is failed
    assert found.curves[1].first_without_memory is None
    assert at(found, "ddp", 160).over_fewest is None, "there is nothing to compare it with"
    assert at(found, "ddp", 160).rate > 0
    assert value(at(found, "ddp", 128).speed_up) == pytest.approx(1.6)


def test_sizes_per_rank(tmp_path: Path) -> None:
    """The same size per rank is compared: twice the batch on two ranks."""
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e", sizes=(64,), per_rank=True, trains=False))
    point = at(found, "ddp", 64)
    assert (point.batch, point.batch_per_rank) == (128, 64)
    assert value(point.speed_up) == pytest.approx((128 / 0.10) / (64 / 0.10))


def test_no_speed_up_is_reported_for_ranks_that_share_cores(tmp_path: Path) -> None:
    path = write_batch_sizes(tmp_path / "e", sizes=(64,), ranks=(1, 4), cores=2.0, trains=False)
    found = read_batch_sizes(path)
    point = at(found, "ddp", 64)
    assert (point.oversubscribed, point.over_fewest) == ("4 ranks share 2 cores", None)
    assert "4 ranks share 2 cores, so no speed-up is reported for them." in found.warnings


def test_sizes_that_were_left_out_and_the_learning_rate_are_noted(tmp_path: Path) -> None:
    note = "A global batch of 4,096 is not measured: the training data has 640 samples."
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e", design={"left_out": [note]}))
    assert note in found.warnings
    assert any(warning.startswith("The learning rate is 0.1 at every batch size") for warning in found.warnings)


def test_an_experiment_without_runs(tmp_path: Path) -> None:
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e", repeats=0, interrupted=True))
    assert found.comparison.interrupted
    assert (found.best, found.equal_time_s) == (None, None)
    assert all(curve.enough is None for curve in found.curves)


def test_a_comparison_is_no_experiment_over_batch_sizes(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="not one experiment over batch sizes"):
        batch_sizes(collect_records([read_experiment(write_experiment(tmp_path / "e"))]))


def test_losses_and_accuracies_leave_out_diverged_and_interrupted_runs(tmp_path: Path) -> None:
    """Repeat 1 of ddp with batch 64 diverged, repeat 2 was interrupted in its second epoch."""
    name = "ddp on 2, batch 64"
    ends = RunEnds(diverged=[(name, 1)], unfinished=[(name, 2)])
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e", ends=ends))
    point, other = at(found, "ddp", 64), at(found, "ddp", 128)
    for estimate in (point.end_loss, point.end_accuracy, point.equal_time_loss, point.equal_time_accuracy):
        assert estimate is not None
        assert estimate.repeats == 1
    assert value(point.end_loss) == pytest.approx((0.8 + 0.4) / 2)
    assert value(point.end_accuracy) == pytest.approx((0.625 + 0.75) / 2)
    assert other.end_loss is not None
    assert other.end_loss.repeats == 3
    assert found.accuracy_difference(point, other) is None, "one seed is too few"


def test_a_run_that_diverged_does_not_set_the_equal_time(tmp_path: Path) -> None:
    fastest = "ddp on 2, batch 128"
    ends = RunEnds(diverged=[(fastest, repeat) for repeat in range(3)])
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e", ends=ends))
    assert value(found.equal_time_s) == pytest.approx(2.4), "single with batch 128 and ddp with batch 64"


def test_a_point_that_cannot_be_recommended_is_not_the_best(tmp_path: Path) -> None:
    """topk is the fastest of all, and ddp with batch 128 diverged in a repeat in which batch 64 did not."""
    ends = RunEnds(diverged=[("ddp on 2, batch 128", 0), ("single on 1, batch 128", 0)])
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e", lossy=["topk"], ends=ends))
    rates = {(point.strategy, point.size): point.rate for point in found.points}
    assert max(rates, key=rates.__getitem__)[0] == "topk"
    assert found.best is at(found, "ddp", 64)
    best = {
        curve.strategy: (curve.best and curve.best.size, curve.enough and curve.enough.size) for curve in found.curves
    }
    assert best["ddp"] == best["single"] == (64, 64)
    assert best["topk"][0] is not None, "a strategy has a fastest size, too, if none of its points computes the same"


def test_a_point_that_cannot_be_recommended_is_the_best_where_there_is_no_other(tmp_path: Path) -> None:
    failures = {f"ddp on 2, batch {size}": "rank 0 failed: ValueError." for size in (64, 128)}
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e", ranks=(2,), lossy=["topk"], failures=failures))
    assert found.best is not None
    assert found.best.strategy == "topk"


def test_a_difference_in_accuracy_counts_the_test_samples_and_the_number_of_points(tmp_path: Path) -> None:
    """The seeds show the same difference, but the 1,000 test samples are themselves a sample."""
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e"))
    difference = found.accuracy_difference(at(found, "ddp", 64), at(found, "ddp", 128))
    assert difference is not None
    assert difference.low is not None
    error = ((0.96 * 0.04 + 0.91 * 0.09) / 1000) ** 0.5
    assert difference.value - difference.low == pytest.approx(2.413 * error, rel=1e-3), "level 1 − 0.05 ÷ 3, t(200)"


def test_all_epochs_are_extrapolated_where_one_size_trained_less_than_an_epoch(tmp_path: Path) -> None:
    short = RunEnds(short=[("single on 1, batch 64", repeat) for repeat in range(3)])
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e", ends=short, length={"seconds": 1.0}))
    assert not any(point.epoch_is_measured for point in found.points)
    assert value(at(found, "ddp", 128).epoch_s) == pytest.approx(5 * 0.1, rel=0.5)
    ends = RunEnds(short=[("single on 1, batch 64", 0)])
    one = read_batch_sizes(write_batch_sizes(tmp_path / "one", ends=ends, length={"seconds": 1.0}))
    assert all(point.epoch_is_measured for point in one.points), "its other repeats trained whole epochs"
    epoch_s = at(one, "single", 64).epoch_s
    assert epoch_s is not None
    assert (epoch_s.repeats, epoch_s.value) == (2, pytest.approx(1.0))


def test_test_results_at_equal_time_are_those_of_the_last_evaluation_by_then(tmp_path: Path) -> None:
    """The fastest run has had its last evaluation when it ends; the others only that after their first window."""
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e", is_tested=True))
    fastest, other = at(found, "ddp", 128), at(found, "ddp", 64)
    assert value(fastest.equal_time_test_accuracy) == pytest.approx(0.70)
    assert value(fastest.equal_time_test_loss) == pytest.approx(0.5)
    assert value(other.equal_time_test_accuracy) == pytest.approx(0.20)
    assert value(other.equal_time_test_loss) == pytest.approx(2.1)
    without = read_batch_sizes(write_batch_sizes(tmp_path / "without"))
    assert at(without, "ddp", 64).equal_time_test_accuracy is None


NOTE = (
    "single had 2 cores, each of several ranks has 1 core: the speed-up is one over different cores per rank. "
    "Set --threads to give every rank as many."
)


def test_a_speed_up_over_a_process_with_more_cores_is_noted(tmp_path: Path) -> None:
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e"))
    assert [(point.ranks, point.threads) for point in found.points] == [(1, 2), (1, 2), (2, 1), (2, 1)]
    assert found.threads_differ
    assert found.warnings.count(NOTE) == 1, "one note for all points"
    gains = [point.over_fewest for point in found.points if point.ranks == 2]
    assert all(gain is not None and gain.unequal_cores for gain in gains)


def test_a_speed_up_over_as_many_cores_is_not_noted(tmp_path: Path) -> None:
    path = write_batch_sizes(tmp_path / "e")
    for file in path.rglob("run.json"):
        file.write_text(file.read_text().replace('"threads": 2', '"threads": 1'))
    found = read_batch_sizes(path)
    assert {point.threads for point in found.points} == {1}
    assert not found.threads_differ
    assert NOTE not in found.warnings
    assert all(point.over_fewest is None or not point.over_fewest.unequal_cores for point in found.points)


@pytest.mark.parametrize(("load", "is_noted"), [(1.3, True), (0.05, False), (None, False)])
def test_a_peak_that_was_measured_beside_other_load_is_noted(
    tmp_path: Path, load: float | None, is_noted: bool
) -> None:
    found = read_batch_sizes(write_batch_sizes(tmp_path / "e", design={"core_other_load": load}))
    note = (
        "Other programs used 1.3 of 2 cores while the peak of the processor was measured, so that it may be too low, "
        "and MFU too high. Repeat on a quiet machine for the MFU."
    )
    assert (note in found.warnings) == is_noted
