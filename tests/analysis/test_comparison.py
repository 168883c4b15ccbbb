"""Every value of the comparison table, from experiments with known results."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from experiments_on_disk import CLASSIC, read_comparison, write_experiment
from paceline.analysis.comparison import Comparison, compare
from paceline.analysis.loss_difference import identical_groups
from paceline.analysis.record_set import collect_records
from paceline.analysis.statistics import estimate_times
from paceline.records import RunFolder, RunRecord, Summary
from paceline.records.experiment.design import Candidate
from paceline.records.experiment.record import read_experiment
from paceline.records.find import find_records
from paceline.records.writer import json_safe
from paceline.report.evidence import loss_difference_row, loss_difference_sentences
from run_models import rank_summary, summary

STEP_S = {"single": 0.04, "none": 0.01, "allreduce": 0.03, "ddp": 0.02}


def test_rows_are_sorted_by_speed_with_ratios_to_the_reference(tmp_path: Path) -> None:
    comparison = read_comparison(write_experiment(tmp_path / "e", step_s=STEP_S, repeats=3))
    assert [row.candidate.name for row in comparison.rows] == ["none", "ddp", "allreduce", "single"]
    allreduce = comparison.row("allreduce")
    assert allreduce.step_s is not None
    assert allreduce.step_s.value == pytest.approx(0.03, rel=0.02)
    assert allreduce.ratio is not None
    assert allreduce.ratio.value == pytest.approx(1.5, rel=0.03)
    assert comparison.row("none").ratio is not None


def test_the_ratio_of_single_is_per_sample_since_its_batch_is_smaller(tmp_path: Path) -> None:
    single = read_comparison(write_experiment(tmp_path / "e", step_s=STEP_S)).row("single")
    assert single.ratio is not None
    assert single.ratio.value == pytest.approx(0.04 / 0.02 * 2, rel=0.03)


def test_time_above_the_bound(tmp_path: Path) -> None:
    comparison = read_comparison(write_experiment(tmp_path / "e", step_s=STEP_S))
    exposed = {row.candidate.name: row.above_bound for row in comparison.rows}
    assert exposed["ddp"] is not None
    assert exposed["ddp"].value == pytest.approx(0.5, abs=0.02)
    assert exposed["none"] is None
    assert exposed["single"] is None


def test_without_a_bound_there_is_no_time_above_it(tmp_path: Path) -> None:
    candidates = [candidate for candidate in CLASSIC if candidate.role != "bound"]
    comparison = read_comparison(write_experiment(tmp_path / "e", candidates))
    assert all(row.above_bound is None for row in comparison.rows)


def test_the_bound_of_the_same_settings_counts(tmp_path: Path) -> None:
    candidates = [
        Candidate(f"{strategy} bn={bn}", strategy, {"bn": bn}, role, strategy != "none")
        for strategy, role in (("none", "bound"), ("ddp", "candidate"))
        for bn in ("local", "sync")
    ]
    step_s = {"none bn=local": 0.01, "none bn=sync": 0.02, "ddp bn=local": 0.04, "ddp bn=sync": 0.04}
    comparison = read_comparison(write_experiment(tmp_path / "e", candidates, step_s=step_s))
    exposed = comparison.row("ddp bn=sync").above_bound
    assert exposed is not None
    assert exposed.value == pytest.approx(0.5, abs=0.02)


def test_failures_have_a_row_without_values(tmp_path: Path) -> None:
    comparison = read_comparison(write_experiment(tmp_path / "e", failures={"allreduce": "rank 1 failed"}))
    row = comparison.row("allreduce")
    assert (row.failure, row.step_s, row.repeats) == ("rank 1 failed", None, 0)
    assert comparison.rows[-1] is row


def fail(path: Path, name: str) -> Comparison:
    """Let a candidate fail after all its repeats have been measured, and compare."""
    more = {"stage": "repeat 2", "kind": "RankError", "hint": None}
    with (path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "failure", "candidate": name, "message": "rank 1 failed", **more}) + "\n")
    return read_comparison(path)


def test_a_failed_candidate_keeps_its_values_but_is_not_recommended(tmp_path: Path) -> None:
    path = write_experiment(
        tmp_path / "e", step_s=STEP_S | {"p2p": 0.015}, candidates=[*CLASSIC, Candidate("p2p", "p2p")], repeats=3
    )
    assert read_comparison(path).pick == "p2p"
    comparison = fail(path, "p2p")
    assert (comparison.decision.first, comparison.decision.second, comparison.pick) == ("ddp", "allreduce", "ddp")
    assert [row.candidate.name for row in comparison.rows] == ["none", "ddp", "allreduce", "single", "p2p"]
    assert comparison.row("p2p").step_s is not None
    assert [row.candidate.name for row in comparison.with_role("candidate")] == ["ddp", "allreduce"]


def test_a_failed_baseline_is_not_recommended(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", step_s=STEP_S | {"single": 0.001}, repeats=4)
    assert read_comparison(path).pick == "single"
    comparison = fail(path, "single")
    assert (comparison.pick, comparison.over_one_process(), comparison.with_role("baseline")) == ("ddp", None, [])


def test_failed_candidates_with_values_are_listed_before_those_without(tmp_path: Path) -> None:
    comparison = fail(write_experiment(tmp_path / "e", failures={"none": "no"}, step_s=STEP_S), "allreduce")
    assert [row.candidate.name for row in comparison.rows] == ["ddp", "single", "allreduce", "none"]


def test_another_reference_replaces_one_that_was_not_measured(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", step_s=STEP_S, repeats=3)
    for file in path.glob("repeat-*/4/run.json"):
        file.unlink()
    comparison = read_comparison(path)
    assert comparison.reference == "allreduce"
    assert "ddp was not measured, so ratios are relative to allreduce." in comparison.warnings
    ratio = comparison.row("none").ratio
    assert ratio is not None
    assert ratio.value == pytest.approx(1 / 3, rel=0.03)
    assert comparison.row("single").accuracy_gain is not None
    assert {loss_difference.reference for loss_difference in comparison.loss_differences} == {"allreduce"}


def test_another_reference_replaces_one_that_failed(tmp_path: Path) -> None:
    comparison = fail(write_experiment(tmp_path / "e", step_s=STEP_S), "ddp")
    assert comparison.reference == "allreduce"
    assert "ddp failed, so ratios are relative to allreduce." in comparison.warnings
    assert comparison.record_set.reference == "ddp"


def test_without_a_candidate_the_first_that_was_measured_is_the_reference(tmp_path: Path) -> None:
    comparison = read_comparison(write_experiment(tmp_path / "e", failures={"ddp": "no", "allreduce": "no"}))
    assert comparison.reference == "single"


def test_without_measurements_the_reference_stays(tmp_path: Path) -> None:
    comparison = read_comparison(write_experiment(tmp_path / "e", repeats=0))
    assert (comparison.reference, comparison.warnings) == ("ddp", [])


@pytest.mark.parametrize("written", [None, summary(average_loss=None, ranks=[]), summary(0, average_loss=None)])
def test_values_that_a_summary_lacks_are_none(tmp_path: Path, written: Summary | None) -> None:
    path = write_experiment(tmp_path / "e")
    for file in path.rglob("summary.json"):
        file.unlink()
        if written is not None:
            RunFolder(file.parent).write_summary(written)
    row = read_comparison(path).row("ddp")
    assert row.step_s is not None
    found = (row.train_loss, row.test_loss, row.test_accuracy, row.peak_bytes, row.busiest_sent_bytes, row.imbalance)
    assert found == (None,) * 6


def test_cpu_time_per_step_is_summed_over_the_ranks(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e")
    shares: list[float | None] = [0.5, 0.75]
    ranks = [replace(rank_summary(rank), cpu_share=share) for rank, share in enumerate(shares)]
    for file in path.rglob("summary.json"):
        RunFolder(file.parent).write_summary(summary(step_s=0.2, ranks=ranks))
    assert read_comparison(path).row("ddp").cpu_s == estimate_times([0.25] * 2)
    for file in path.rglob("summary.json"):
        RunFolder(file.parent).write_summary(summary(ranks=[ranks[0], replace(ranks[1], cpu_share=None)]))
    assert read_comparison(path).row("ddp").cpu_s is None, "one rank is unknown"


def set_accuracies(path: Path, place: int, accuracies: list[float], samples: int = 360) -> None:
    for repeat, accuracy in enumerate(accuracies):
        file = path / f"repeat-{repeat + 1}" / str(place) / "summary.json"
        content = json.loads(file.read_text())
        content["test"] |= {"accuracy": accuracy, "samples": samples}
        file.write_text(json.dumps(content))


def test_the_same_small_difference_in_every_repeat_may_be_the_test_set(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", repeats=4)
    set_accuracies(path, 3, [0.5 + 1 / 360] * 4)
    gain = read_comparison(path).row("allreduce").accuracy_gain
    assert gain is not None
    assert gain.value == pytest.approx(1 / 360)
    assert gain.spans(0)
    assert gain.low is not None
    assert gain.high is not None
    # Both sides have a binomial error; 2.39 is the normal quantile for a confidence of 1 - 0.05 / 3.
    assert (gain.high - gain.low) / 2 == pytest.approx(2.39 * math.sqrt(2 * 0.25 / 360), rel=0.02)


def test_a_difference_beyond_the_error_of_the_test_set_is_significant(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", repeats=4)
    set_accuracies(path, 3, [0.6, 0.62, 0.61, 0.6], samples=10_000)
    set_accuracies(path, 4, [0.5, 0.5, 0.51, 0.5], samples=10_000)
    gain = read_comparison(path).row("allreduce").accuracy_gain
    assert gain is not None
    assert not gain.spans(0)


def test_two_seeds_are_too_few_for_accuracy(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", repeats=2)
    set_accuracies(path, 3, [0.9, 0.9])
    assert read_comparison(path).row("allreduce").accuracy_gain is None


def test_non_finite_values_are_null_in_json(tmp_path: Path) -> None:
    def losses(candidate: Candidate, repeat: int, step: int) -> float:
        return math.nan if candidate.name == "allreduce" and step > 4 else 2.0 + repeat

    path = write_experiment(tmp_path / "e", losses=losses, skipped={"allreduce": range(5, 12)})
    with (path / "events.jsonl").open("a") as file:
        proof = {"error": None, "factor": None, "tolerance": 1e-5, "lossless": True, "ranks": 2, "steps": 3}
        file.write(json.dumps({"event": "parity", "candidate": "ddp", "strategy": "ddp", **proof}) + "\n")
    comparison = read_comparison(path)
    parts = [*comparison.proofs, *comparison.loss_differences, comparison.decision]
    for part in parts:
        assert json.loads(json.dumps(part.to_dict(), allow_nan=False)) == json_safe(part.to_dict())
    assert math.isinf(comparison.proofs[-1].error)
    assert comparison.proofs[-1].to_dict()["error"] is None
    assert (
        next(p for p in comparison.loss_differences if p.candidate == "allreduce").to_dict()["last_difference"] is None
    )


def test_an_experiment_without_runs_is_an_empty_comparison(tmp_path: Path) -> None:
    comparison = read_comparison(write_experiment(tmp_path / "e", repeats=0, interrupted=True))
    assert comparison.interrupted
    assert comparison.decision.outcome == "no_candidate"
    assert all(row.step_s is None for row in comparison.rows)


def test_interrupted_runs_count_up_to_their_end(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", steps=12)
    (run,) = [m.run for m in read_experiment(path).runs if m.repeat == 1 and m.candidate.name == "ddp"]
    for name in ("summary.json", "finished"):
        (run.path / name).unlink()
    lines = (run.path / "events.jsonl").read_text().splitlines()
    (run.path / "events.jsonl").write_text("\n".join(lines[:4]) + "\n")
    row = read_comparison(path).row("ddp")
    assert row.repeats == 2
    assert row.test_accuracy is not None
    assert row.test_accuracy.repeats == 1


def test_losses_that_differ_by_rounding(tmp_path: Path) -> None:
    def losses(candidate: Candidate, repeat: int, step: int) -> float:
        return (2.0 + repeat) * (
            1 + (1e-8 * 10 ** max(0, step - 2) if candidate.name == "allreduce" and step > 1 else 0)
        )

    comparison = read_comparison(write_experiment(tmp_path / "e", losses=losses))
    loss_differences = {loss_difference.candidate: loss_difference for loss_difference in comparison.loss_differences}
    assert set(loss_differences) == {"single", "allreduce"}
    assert loss_differences["single"].cause == "none"
    assert loss_differences["single"].first_step is None
    loss_difference = loss_differences["allreduce"]
    assert (loss_difference.cause, loss_difference.first_step, loss_difference.visible_step) == ("rounding", 2, 8)
    assert identical_groups(comparison.record_set) == [["single", "ddp"]]


def test_batchnorm_makes_losses_of_other_shards_differ(tmp_path: Path) -> None:
    def losses(candidate: Candidate, repeat: int, step: int) -> float:
        return 2.0 + 0.01 * (candidate.name == "single") - 0.01 * step + repeat

    path = write_experiment(tmp_path / "e", losses=losses)
    assert {p.candidate: p.cause for p in read_comparison(path).loss_differences}["single"] == "unknown"
    for file in path.rglob("run.json"):
        content = json.loads(file.read_text())
        content["topology"]["batch_norm_layers"] = 8
        file.write_text(json.dumps(content))
    causes = {
        loss_difference.candidate: loss_difference.cause for loss_difference in read_comparison(path).loss_differences
    }
    assert causes == {"single": "batch_norm", "allreduce": "none"}
    for file in path.rglob("run.json"):
        content = json.loads(file.read_text())
        content["config"]["bn"] = "sync"
        file.write_text(json.dumps(content))
    assert {p.candidate: p.cause for p in read_comparison(path).loss_differences}["single"] == "unknown"


def test_dropout_makes_losses_on_other_numbers_of_ranks_differ(tmp_path: Path) -> None:
    def losses(candidate: Candidate, repeat: int, step: int) -> float:
        return 2.0 + 0.01 * (candidate.name in ("single", "allreduce")) - 0.01 * step + repeat

    path = write_experiment(tmp_path / "e", losses=losses)
    for file in path.rglob("run.json"):
        content = json.loads(file.read_text())
        content["topology"]["random_layers"] = 2
        file.write_text(json.dumps(content))
    comparison = read_comparison(path)
    assert {p.candidate: p.cause for p in comparison.loss_differences} == {
        "single": "random_layers",
        "allreduce": "unknown",
    }
    assert {loss_difference_row(p).cause.partition(":")[0] for p in comparison.loss_differences} == {
        "Dropout",
        "Unknown",
    }


@pytest.mark.parametrize(
    ("names", "losses_of"),
    [
        ({"allreduce"}, "The loss of allreduce differs"),
        ({"allreduce", "single"}, "The losses of single and allreduce differ"),
    ],
)
def test_small_loss_differences_are_summarised(tmp_path: Path, names: set[str], losses_of: str) -> None:
    def losses(candidate: Candidate, repeat: int, step: int) -> float:
        return 2.0 + repeat + (1e-6 if candidate.name in names and step > 1 else 0)

    said = " ".join(loss_difference_sentences(read_comparison(write_experiment(tmp_path / "e", losses=losses))))
    assert f"{losses_of} from that of ddp by less than 0.1% in every step." in said


def test_experiments_of_two_machines_are_separate_and_warn(tmp_path: Path) -> None:
    paths = [
        write_experiment(tmp_path / host, repeats=2, provenance={"host": host, "cpu": f"cpu of {host}"})
        for host in ("here", "there")
    ]
    comparison = compare(collect_records([read_experiment(path) for path in paths]))
    names = {row.candidate.name for row in comparison.rows}
    assert {"ddp @here", "ddp @there"} <= names
    assert len(names) == 8
    assert comparison.reference == "ddp @here"
    assert any("different machines" in warning for warning in comparison.warnings)
    other = comparison.row("ddp @there").ratio
    assert other is not None
    assert other.low is None


def test_experiments_that_differ_in_a_setting_have_it_in_their_names(tmp_path: Path) -> None:
    paths = [write_experiment(tmp_path / bn, settings={"bn": bn}) for bn in ("local", "sync")]
    names = {row.candidate.name for row in compare(collect_records([read_experiment(path) for path in paths])).rows}
    assert {"ddp bn=local", "ddp bn=sync"} <= names


def test_equal_experiments_are_numbered(tmp_path: Path) -> None:
    paths = [write_experiment(tmp_path / name) for name in ("one", "two")]
    names = {row.candidate.name for row in compare(collect_records([read_experiment(path) for path in paths])).rows}
    assert {"ddp", "ddp (2)"} <= names


def test_separate_runs_become_candidates_by_their_settings(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", repeats=2)
    records, _ = find_records([path / "repeat-1", path / "repeat-2"])
    assert all(isinstance(record, RunRecord) for record in records)
    comparison = compare(collect_records(records))
    assert {row.candidate.name: row.repeats for row in comparison.rows} == dict.fromkeys(STEP_S, 2)
    assert comparison.row("none").candidate.role == "bound"
    assert comparison.row("single").candidate.role == "baseline"


def test_ranks_that_differ_are_flagged(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e")
    for file in path.rglob("3/rank-1.csv"):
        lines = file.read_text().splitlines()
        slower = [_with_update(line, 0.02) for line in lines[1:]]
        file.write_text("\n".join([lines[0], *slower]) + "\n")
    comparison = read_comparison(path)
    assert comparison.row("allreduce").rank_step_spread is not None
    assert comparison.row("ddp").rank_step_spread is None
    assert any("allreduce: step times differ" in warning for warning in comparison.warnings)


def _with_update(line: str, more_s: float) -> str:
    values = line.split(",")
    values[7] = f"{float(values[7]) + more_s:.6f}"
    return ",".join(values)


def test_a_ratio_that_contradicts_the_medians_is_explained(tmp_path: Path) -> None:
    times = {"allreduce": (4.00, 4.06, 8.0), "ddp": (4.09, 3.5, 7.0)}
    candidates = [Candidate("ddp", "ddp"), Candidate("allreduce", "allreduce")]
    path = write_experiment(tmp_path / "e", candidates, repeats=3)
    note = (
        "ddp: the ratio to allreduce and the median times contradict each other, because ratios are paired by repeat "
        "and medians are not. The ratio is more reliable, since the load of the machine changes from repeat to repeat."
    )
    assert note not in read_comparison(path).warnings
    for entry in read_experiment(path).runs:
        file = Path(entry.run.path) / "events.jsonl"
        events = [json.loads(line) for line in file.read_text().splitlines()]
        for event in events:
            if event["event"] == "log":
                event["wall_s"] = 1e-3 * times[entry.candidate.name][entry.repeat] * len(event["losses"])
        file.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    comparison = read_comparison(path)
    rows = {row.candidate.name: row for row in comparison.rows}
    assert rows["allreduce"].step_s.value < rows["ddp"].step_s.value
    assert rows["ddp"].ratio.value < 1
    assert comparison.warnings.count(note) == 1
