"""`paceline large-batch` from the command line, with real ranks, and every output of its results."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from commands import paceline
from large_batches_on_disk import read_large_batches, write_large_batches
from paceline.cli.large_batch import LargeBatchRequest
from paceline.cli.main import parse, run
from paceline.config import LargeBatchConfig
from paceline.errors import RecordError
from paceline.report.page.large_batch import large_batch_plots, render_large_batches
from paceline.report.tables.large_batch import write_large_batch_tables
from paceline.report.terminal.large_batch import print_large_batches
from paceline.report.terminal.large_batch import to_json as large_batch_json

pytestmark = pytest.mark.takes(14)

SMALL = ("large-batch", "cnn", "--data", "digits", "--ranks", "2", "--no-events", "--reference", "16", "--large", "256")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The reference, plain training and LARS with one seed, shared by the tests that only read it."""
    out = tmp_path_factory.mktemp("large") / "out"
    what = (*SMALL, "--lr", "0.003", "--epochs", "6", "--remedies", "lars", "--seeds", "1", "--noise-scale", "all")
    done = paceline(*what, "--out", str(out), "--json", ranks=2)
    result: dict[str, Any] = json.loads(done.stdout)
    return result | {"out": out, "messages": done.stderr, "command": what}


def test_a_large_batch_loses_accuracy_and_a_remedy_repairs_most_of_it(trained: dict[str, Any]) -> None:
    accuracy = {own["name"]: own["test_accuracy"]["value"] for own in trained["candidates"]}
    assert accuracy["16 reference"] > 0.9
    assert accuracy["256 plain"] < accuracy["16 reference"] - 0.2
    assert accuracy["256 lars"] > accuracy["256 plain"] + 0.2
    found = {own["name"]: own for own in trained["candidates"]}
    assert found["256 lars"]["gained"]["value"] == pytest.approx(accuracy["256 lars"] - accuracy["256 plain"])
    assert found["256 plain"]["lost"]["value"] == pytest.approx(accuracy["256 plain"] - accuracy["16 reference"])
    assert (found["16 reference"]["updates"], found["256 plain"]["updates"]) == (540, 36)
    assert found["256 plain"]["lr"] == pytest.approx(0.003)
    assert found["256 lars"]["lr"] == pytest.approx(2.0), "that of a batch of 256"
    assert trained["best"] == {"256": "256 lars"}


def test_the_noise_scale_of_the_reference_predicts_the_epochs_of_the_large_batch(trained: dict[str, Any]) -> None:
    reference, plain, _ = trained["candidates"]
    noise = reference["noise_scale"]["value"]
    assert 1 < noise < 10_000
    assert plain["epochs_factor"] == pytest.approx((noise + 256) / (noise + 16))
    assert any("The gradient noise scale of the reference" in sentence for sentence in trained["verdict"])


def test_progress_has_accuracies_and_the_report_is_written(trained: dict[str, Any]) -> None:
    assert "after 1 repeat: 16 reference 9" in trained["messages"]
    assert Path(trained["report"]).stat().st_size > 1e6
    assert trained["design"]["reference_batch"] == 16
    assert trained["design"]["proof"] is False


def test_a_finished_experiment_goes_on_with_more_seeds_only(trained: dict[str, Any]) -> None:
    done = paceline(*trained["command"], "--out", str(trained["out"]), expect=RecordError.exit_code, ranks=0)
    assert "larger --seeds measures more" in done.stderr


def test_a_divergence_is_a_result(tmp_path: Path) -> None:
    what = (*SMALL, "--lr", "30", "--epochs", "1", "--remedies", "linear", "--seeds", "1", "--noise-scale", "off")
    done = paceline(*what, "--out", str(tmp_path / "out"), "--json", ranks=2)
    result = json.loads(done.stdout)
    found = {own["name"]: own for own in result["candidates"]}
    assert found["256 linear"]["diverged"][0]["seed"] == 0
    assert found["256 linear"]["test_accuracy"] is None
    assert "linear diverged" in " ".join(result["verdict"])
    assert "is left out" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--large", "100"), "--large names 100, which is not more than the reference batch of 128"),
        (("--large", "4096"), "the training data has 1,437 samples, fewer than a batch of 4,096"),
        (("--remedies", "lasr"), "there is no remedy 'lasr'"),
        (("--remedies", "zero-gamma"), "zero-gamma has no effect: the model has no residual block"),
        (("--batch", "32"), "No such option: --batch"),
        (("--steps", "20"), "No such option: --steps"),
        (("--scale-lr", "linear"), "No such option: --scale-lr"),
        (("--strategy", "nothing"), "there is no strategy 'nothing'"),
        (("cnm",), "did you mean 'cnn'? known: cnn, my_module:make_workload, resnet18"),
        (
            ("--warmup-epochs", "30", "--reference", "16"),
            "--warmup-epochs 30 is not less than the 30 epochs of a run.",
        ),
    ],
)
def test_usage_errors_are_found_before_any_rank_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], error: str
) -> None:
    assert run(["large-batch", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert error in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_own_settings_take_the_place_of_those_of_a_run() -> None:
    request = parse(["large-batch", "--warmup-epochs", "2", "--noise-scale", "all", "--large", "1024,512"])
    assert isinstance(request, LargeBatchRequest)
    assert request.large_batch == LargeBatchConfig(warmup_epochs=2.0, noise_scale="all", large="1024,512")
    assert (request.run.warmup_epochs, request.run.noise_scale) == (None, "off")


def test_page_files_and_terminal_show_all_candidates(tmp_path: Path) -> None:
    path = write_large_batches(tmp_path / "e", sizes=(320, 640), diverged=[("320 linear", 1)])
    found = read_large_batches(path)
    page = render_large_batches(found)
    stream = io.StringIO()
    print_large_batches(found, Console(file=stream, width=220, color_system=None))
    write_large_batch_tables(found, tmp_path / "csv")
    rows = list(csv.DictReader((tmp_path / "csv" / "large_batch.csv").read_text().splitlines()))
    names = [row.row.candidate.name for row in found.rows]
    assert len(names) == 9
    assert [
        f"{row['batch']} {row['remedies'] or ('reference' if row['reference'] == 'True' else 'plain')}" for row in rows
    ] == names
    assert rows[3]["added_by_linear"] == rows[8]["added_by_lars"] == ""
    assert float(rows[8]["added_by_linear"]) == pytest.approx(0.29)
    assert [own["name"] for own in large_batch_json(found)["candidates"]] == names
    for text in ("linear+warmup", "diverged in 1 of 3 runs", "× batch ÷ reference batch"):
        assert text in page
    assert "the learning rate rises linearly in the first epochs (one epoch)" in stream.getvalue()
    assert stream.getvalue().count("linear+warmup") >= 4
    plots = large_batch_plots(found)
    assert plots.keys() == {"results", "losses", "validation", "noise"}
    assert {plots[name]["first_axis"] for name in ("losses", "validation")} == {"Epoch"}


def test_nothing_tested_draws_no_plot_of_results(tmp_path: Path) -> None:
    found = read_large_batches(write_large_batches(tmp_path / "e", measured=0))
    assert large_batch_plots(found) == {}
    assert "The reference has not been tested yet" in render_large_batches(found)


def test_a_record_is_shown_again_by_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_large_batches(tmp_path / "e")
    assert run(["report", str(path), "--csv", str(tmp_path / "csv")]) == 0
    shown = capsys.readouterr().out
    assert "repairs a batch of 320" in shown
    assert "machine" not in shown, "times are not compared, so nothing is said on what disturbs them"
    assert (tmp_path / "csv" / "evaluations.csv").exists()
