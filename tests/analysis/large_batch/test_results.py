"""Tests of the results of experiments with large batches: differences between candidates, and predictions."""

from __future__ import annotations

from pathlib import Path

import pytest

from large_batches_on_disk import read_large_batches, write_large_batches
from paceline.analysis.large_batch.results import LargeBatches, LargeBatchRow, large_batches
from paceline.analysis.record_set import collect_records
from paceline.errors import RecordError
from paceline.records.experiment.record import read_experiment


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> LargeBatches:
    return read_large_batches(write_large_batches(tmp_path_factory.mktemp("large") / "e"))


def row_of(found: LargeBatches, name: str) -> LargeBatchRow:
    return next(row for row in found.rows if row.row.candidate.name == name)


def test_differences_are_to_the_reference_and_to_plain_training_at_the_same_batch(found: LargeBatches) -> None:
    lost = {row.row.candidate.name: row.lost and row.lost.value for row in found.rows}
    assert lost == {
        "32 reference": None,
        "320 plain": pytest.approx(-0.3),
        "320 linear": pytest.approx(-0.15),
        "320 warmup": pytest.approx(-0.3),
        "320 linear+warmup": pytest.approx(-0.01),
    }
    gained = {row.row.candidate.name: row.gained and row.gained.value for row in found.rows}
    assert gained == {
        "32 reference": None,
        "320 plain": None,
        "320 linear": pytest.approx(0.15),
        "320 warmup": pytest.approx(0),
        "320 linear+warmup": pytest.approx(0.29),
    }


def test_intervals_have_the_sampling_error_of_the_test_data_alone_if_seeds_agree(found: LargeBatches) -> None:
    gained = row_of(found, "320 linear").gained
    assert gained is not None
    assert gained.low is not None
    sampling = (0.75 * 0.25 / 1000 + 0.6 * 0.4 / 1000) ** 0.5
    assert gained.value - gained.low == pytest.approx(1.96 * sampling, rel=0.01)


def test_differences_of_accuracies_stay_within_100_points(tmp_path: Path) -> None:
    level: dict[tuple[str, ...], tuple[float, ...]] = dict.fromkeys(
        [(), ("linear",), ("warmup",), ("linear", "warmup")], (0.5,) * 4
    )
    found = read_large_batches(write_large_batches(tmp_path / "e", accuracies=level, spread=0.45))
    lost = row_of(found, "320 plain").lost
    assert lost is not None
    assert lost.low == -1
    assert lost.high is not None
    assert lost.high < 1


def test_each_remedy_of_a_combination_has_what_it_adds_to_the_others(found: LargeBatches) -> None:
    added = {gain.remedy: gain.added.value for gain in row_of(found, "320 linear+warmup").added}
    assert added == {"linear": pytest.approx(0.29), "warmup": pytest.approx(0.14)}
    assert all(not row.added for row in found.rows if len(row.remedies) < 2)


def test_the_noise_scale_of_the_reference_predicts_epochs_and_accuracy(found: LargeBatches) -> None:
    assert found.noise_scale is not None
    assert found.noise_scale.value == pytest.approx(288)
    plain = row_of(found, "320 plain")
    assert plain.epochs_factor == pytest.approx(608 / 320)
    # The reference had 70% after 2 epochs and 85% after 3; 4 ÷ 1.9 epochs are 2.105.
    assert plain.predicted_accuracy == pytest.approx(0.7 + (4 / 1.9 - 2) * 0.15)
    assert found.reference.epochs_factor == pytest.approx(1)
    assert found.reference.predicted_accuracy == pytest.approx(0.9)


def test_a_prediction_before_the_first_evaluation_has_no_accuracy(tmp_path: Path) -> None:
    found = read_large_batches(write_large_batches(tmp_path / "e", noise_scale=8.0))
    plain = row_of(found, "320 plain")
    assert plain.epochs_factor == pytest.approx(328 / 40)
    assert plain.predicted_accuracy is None


def test_without_a_noise_scale_nothing_is_predicted(tmp_path: Path) -> None:
    found = read_large_batches(write_large_batches(tmp_path / "e", noise_scale=None))
    assert found.noise_scale is None
    assert all(row.epochs_factor is None and row.predicted_accuracy is None for row in found.rows)


def test_updates_rates_losses_and_training_accuracies_are_those_of_the_runs(found: LargeBatches) -> None:
    assert [row.updates for row in found.rows] == [80, 8, 8, 8, 8]
    assert {row.lr for row in found.rows} == {0.1}
    plain = row_of(found, "320 plain")
    assert plain.end_loss is not None
    assert plain.end_accuracy is not None
    assert (plain.end_loss.value, plain.end_accuracy.value) == pytest.approx((0.4, 0.6))
    assert [row.runs for row in found.rows] == [3] * 5


def test_a_repaired_batch_loses_at_most_two_points_and_never_diverged(tmp_path: Path, found: LargeBatches) -> None:
    assert [row.row.candidate.name for row in found.rows if row.is_repaired] == ["320 linear+warmup"]
    best = found.best(320)
    assert best is not None
    assert best.row.candidate.name == "320 linear+warmup"
    diverged = read_large_batches(write_large_batches(tmp_path / "e", diverged=[("320 linear+warmup", 1)]))
    assert [row for row in diverged.rows if row.is_repaired] == []


def test_runs_that_diverged_are_counted_and_left_out_of_accuracies(tmp_path: Path) -> None:
    found = read_large_batches(write_large_batches(tmp_path / "e", diverged=[("320 linear", 0), ("320 linear", 1)]))
    linear = row_of(found, "320 linear")
    assert (linear.runs, linear.diverged_runs) == (3, 2)
    assert linear.accuracy == pytest.approx(0.74), "that of the third seed"
    assert linear.gained is not None
    assert linear.gained.value == pytest.approx(0.15), "of the common seed"
    assert linear.gained.low is None
    everything = read_large_batches(
        write_large_batches(tmp_path / "all", diverged=[("320 plain", repeat) for repeat in range(3)])
    )
    plain = row_of(everything, "320 plain")
    assert (plain.runs, plain.diverged_runs, plain.accuracy, plain.lost) == (3, 3, None, None)
    assert row_of(everything, "320 linear").gained is None


def test_an_accuracy_that_guessing_explains_is_at_chance(tmp_path: Path) -> None:
    path = write_large_batches(tmp_path / "e", accuracies={(): (0.1, 0.1, 0.1, 0.1)})
    found = read_large_batches(path)
    assert [row.row.candidate.name for row in found.rows if row.is_at_chance] == ["320 plain"]


def test_several_sizes_have_their_own_rows_plain_first(tmp_path: Path) -> None:
    found = read_large_batches(write_large_batches(tmp_path / "e", sizes=(320, 640), repeats=1))
    assert {size: [row.row.candidate.name for row in rows] for size, rows in found.by_size.items()} == {
        size: [f"{size} plain", f"{size} linear", f"{size} warmup", f"{size} linear+warmup"] for size in (320, 640)
    }
    gained = row_of(found, "640 linear").gained
    assert gained is not None
    assert gained.value == pytest.approx(0.15)
    assert gained.low is None, "one seed has no interval"


def test_a_record_whose_candidates_have_no_batch_is_damaged(tmp_path: Path) -> None:
    path = write_large_batches(tmp_path / "e", repeats=1)
    file = path / "experiment.json"
    file.write_text(file.read_text().replace('"variant"', '"another"'))
    with pytest.raises(RecordError, match="a candidate has no batch and remedies"):
        large_batches(collect_records([read_experiment(path)]))
