"""`paceline batch` from the command line, with real ranks of several world sizes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from commands import forked, paceline, wait_until
from experiments_on_disk import write_experiment
from paceline.cli.batch import BatchRequest
from paceline.cli.main import parse, run
from paceline.config import BatchConfig
from paceline.records.experiment.record import read_experiment

pytestmark = pytest.mark.takes(15)

NEEDS_TESTS = "{} needs runs that are trained and tested.\nhint: use --epochs or --seconds instead of --steps"

QUICK = ("--repeats", "1", "--no-doctor", "--no-proof")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two sizes on one rank and on two, shared by the tests that only read it; a third size exceeds the data."""
    out = tmp_path_factory.mktemp("batch") / "out"
    what = ("batch", "cnn", "--data", "digits", "--sizes", "32,64,4096", "--ranks", "1,2", "--steps", "12")
    done = paceline(*what, "--repeats", "1", "--no-doctor", "--out", str(out), "--json")
    result: dict[str, Any] = json.loads(done.stdout)
    return result | {"out": out, "messages": done.stderr}


def test_every_size_is_measured_on_every_number_of_ranks(swept: dict[str, Any]) -> None:
    points = {(point["strategy"], point["ranks"], point["batch"]): point for point in swept["points"]}
    assert set(points) == {("single", 1, 32), ("single", 1, 64), ("ddp", 2, 32), ("ddp", 2, 64)}
    for (_, ranks, _), point in points.items():
        epoch_s, without_data_s = point["epoch_s"]["value"], point["epoch_without_data_s"]["value"]
        assert 0 < without_data_s < epoch_s
        assert not point["epoch_is_measured"]
        assert point["samples_per_s"]["value"] > 0
        assert point["peak_bytes"] > 0
        assert point["cpu_cores"]["value"] > 0
        assert point["mfu"]["value"] > 0
        assert point["epoch_computing_s"]["value"] > 0
        assert (point["epoch_communicating_s"]["value"] > 0) == (ranks > 1)
        assert point["test_accuracy"] is None, "a few steps are not tested"
    assert swept["kind"] == "batch"
    assert points["ddp", 2, 64]["speed_up_over"] == "single on 1 rank, batch 64"
    assert [(own["ranks"], own["batch"] in (32, 64)) for own in swept["fastest"]] == [(1, True), (2, True)]


def test_the_model_flop_of_a_sample_are_recorded(swept: dict[str, Any]) -> None:
    counts = {measured.run.topology.flop_per_sample for measured in read_experiment(swept["out"]).runs}
    (flop,) = counts
    assert flop is not None
    assert flop > 1e6, "the convolutions of the cnn"
    assert swept["design"]["core_flop_per_s"] > 1e8


def test_a_size_larger_than_the_data_is_left_out_with_a_note(swept: dict[str, Any]) -> None:
    note = "A global batch of 4,096 is not measured: the training data has 1,437 samples."
    assert note in swept["messages"]
    assert note in swept["warnings"]


def test_the_strategy_is_proven_once(swept: dict[str, Any]) -> None:
    assert [(proof["ranks"], proof["holds"]) for proof in swept["proofs"]] == [(2, True)]


def test_the_plan_is_printed_and_everything_can_be_written_again(swept: dict[str, Any], tmp_path: Path) -> None:
    assert "single, ddp · global batches 32, 64 and 4,096 · 1 and 2 ranks" in swept["messages"]
    assert swept["next"].startswith("paceline train --ranks ")
    assert Path(swept["report"]).stat().st_size > 1e6
    done = paceline("report", str(swept["out"]), "--out", str(tmp_path / "page.html"), "--csv", str(tmp_path / "csv"))
    assert "Time per epoch and samples per second" in done.stdout
    assert "Times per epoch are extrapolated" in done.stdout
    assert (tmp_path / "csv" / "batch_sizes.csv").read_text().count("\n") == 1 + 4
    both = (str(swept["out"]), str(write_experiment(tmp_path / "other")))
    other = paceline("report", *both, "--out", str(tmp_path / "page.html"), expect=2)
    assert "an experiment over batch sizes cannot be compared with other records" in other.stderr


def test_a_size_without_memory_is_reported_and_the_others_are_measured(tmp_path: Path) -> None:
    """torch's error at 24, a failure of the allocator at 32 and a killed rank at 48; 16 and 64 are measured."""
    what = ("batch", "user_workloads:without_memory", "--sizes", "16,24,32,48,64", "--ranks", "1", "--epochs", "2")
    done = paceline(*what, *QUICK, "--out", str(tmp_path / "out"), "--json")
    result = json.loads(done.stdout)
    points = {point["batch"]: point for point in result["points"]}
    assert {batch: point["out_of_memory"] for batch, point in points.items()} == {
        16: False,
        24: True,
        32: True,
        48: "probably",
        64: False,
    }
    assert all(points[batch]["epoch_is_measured"] and points[batch]["failure"] is None for batch in (16, 64))
    assert points[24]["failure"] == (
        "rank 0 ran out of memory: OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."
    )
    assert "DefaultCPUAllocator" in points[32]["failure"]
    assert points[48]["failure"] == "rank 0 was killed by SIGKILL, probably because the host ran out of memory."
    assert result["fastest"][0]["out_of_memory_at"] == 24
    assert any("memory limits the batch: 24 ran out of memory" in sentence for sentence in result["verdict"])
    assert points[64]["end_loss"]["value"] > 0, "trained for epochs"
    assert points[64]["equal_time_loss"] is not None or points[16]["equal_time_loss"] is not None


def test_ctrl_c_reports_the_runs_measured_so_far(tmp_path: Path) -> None:
    out = tmp_path / "out"
    what = ("batch", "user_workloads:slow", "--sizes", "16,32", "--ranks", "1", "--steps", "12", "--repeats", "9")
    with forked(*what, "--no-doctor", "--no-proof", "--out", str(out)) as process:
        wait_until(lambda: list(out.glob("repeat-1/*batch-32*/finished")), "a repeat")
        os.kill(process.pid, signal.SIGINT)
        done = process.wait()
    assert done.returncode == 130, done.stderr
    assert "This experiment was interrupted" in done.stdout
    assert (out / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--sizes", "32,x"), "--sizes '32,x' is not a list of positive numbers: 'x'"),
        (("--batch", "32"), "No such option: --batch"),
        (("--sizes", "1", "--ranks", "2"), "A batch of 1 is not measured on 2 ranks: some would have no sample."),
        (
            ("--sizes", "5000", "--ranks", "1"),
            "a global batch of 5,000 is more than the 1,437 samples of the training data",
        ),
        (("--steps", "12", "--eval-every", "5"), NEEDS_TESTS.format("--eval-every")),
        (("--steps", "12", "--eval-ranks"), NEEDS_TESTS.format("--eval-ranks")),
    ],
)
def test_usage_errors_are_found_before_any_rank_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], error: str
) -> None:
    assert run(["batch", *arguments, "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert error in printed
    assert "--no-evaluate" not in printed
    assert not (tmp_path / "out").exists()


def test_settings_come_from_the_command_line_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("sizes = [64, 32]\nper_rank = true\nranks = 2\nepochs = 3\n")
    request = parse(["batch", "vgg11", "--config", str(file), "--ranks", "1,4"])
    assert isinstance(request, BatchRequest)
    assert request.batch_sizes == BatchConfig(sizes="64,32", per_rank=True, ranks="1,4")
    assert request.batch_sizes.batch_sizes == (32, 64)
    assert (request.run.workload, request.run.epochs, request.run.batch) == ("vgg11", 3, None)
    assert request.requested_ranks().total == 4
