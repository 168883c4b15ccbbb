"""Tests of `paceline compare --script` with real scripts and ranks, and with common mistakes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from commands import USER_CODE, paceline
from paceline.cli.main import run
from paceline.records import read_run
from paceline.records.events import LogEvent, UnexaminedEvent
from paceline.records.experiment.record import ExperimentRecord, read_experiment
from paceline.strategies.registry import create

pytestmark = pytest.mark.takes(30)

SCRIPTS = USER_CODE / "scripts"
STEPS = 12
ONCE = ("--repeats", "1", "--max-repeats", "1", "--steps", str(STEPS), "--no-doctor")


def compare(
    out: Path, *arguments: str, args: tuple[str, ...] = (), expect: int = 0, ranks: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Compare strategies in the script, once, on two ranks."""
    options = ("--script", "train.py", "--ranks", "2", *ONCE, "--json", "--out", str(out), *arguments, "--", *args)
    return paceline("compare", *options, expect=expect, cwd=SCRIPTS, ranks=ranks)


def runs_of(out: Path) -> dict[str, Any]:
    return {measured.candidate.name: measured.run for measured in read_experiment(out).runs}


def rows_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return {row["name"]: row for row in json.loads(done.stdout)["rows"]}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[ExperimentRecord, dict[str, Any]]:
    """Return the record and the JSON output of a successful comparison."""
    out = tmp_path_factory.mktemp("compared") / "experiment"
    done = compare(out, "--strategies", "allreduce,ddp,none,single", "--doctor")
    return read_experiment(out), json.loads(done.stdout)


def test_the_machine_is_examined_first(compared: tuple[ExperimentRecord, dict[str, Any]]) -> None:
    record, printed = compared
    examination = record.examination
    assert examination is not None
    assert len(examination.ranks) == 2
    assert examination.link is not None
    assert examination.workload is None, "a script owns its process"
    assert examination.failure is None
    assert printed["examination"] == examination.to_dict()
    assert not record.events_of(UnexaminedEvent)


def test_every_candidate_leaves_an_ordinary_record(compared: tuple[ExperimentRecord, dict[str, Any]]) -> None:
    experiment, _ = compared
    assert [measured.candidate.name for measured in experiment.runs] == ["allreduce", "ddp", "none", "single"]
    for measured in experiment.runs:
        record = read_run(measured.run.path)
        workers = 1 if measured.candidate.name == "single" else 2
        assert record.finished
        assert record.config["strategy"] == measured.candidate.strategy
        assert record.topology.workload == "train.py"
        assert list(record.steps) == list(range(workers))
        assert [len(event.losses) for event in record.events_of(LogEvent)] == [5, STEPS - 5]
        for steps in record.steps.values():
            assert list(steps["step"]) == list(range(STEPS))
            assert (steps["samples"] == 24 / workers).all(), "both micro-batches"
            assert (steps["forward_s"] > 0).all()
            assert (steps["backward_s"] > 0).all()
            assert (steps["correct"] >= 0).all()
        assert record.summary is not None
        assert record.summary.step_s > 0
        assert "left in order" in (record.path / "logs" / "rank-0.log").read_text()


def test_the_record_says_which_script(compared: tuple[ExperimentRecord, dict[str, Any]]) -> None:
    config = compared[0].config
    assert (config["workload"], config["script"], config["args"]) == ("train.py", "train.py", [])
    assert "lr" not in config


def test_lossless_strategies_are_proven_and_train_alike(compared: tuple[ExperimentRecord, dict[str, Any]]) -> None:
    experiment, printed = compared
    assert {proof["candidate"]: proof["holds"] for proof in printed["proofs"]} == {"allreduce": True, "ddp": True}
    assert not list(experiment.path.rglob("gradients.pt")), "they are as large as the model"
    losses = {row["name"]: row["train_loss"]["value"] for row in printed["rows"]}
    assert losses["allreduce"] == pytest.approx(losses["ddp"], rel=1e-5)
    assert {loss_difference["candidate"] for loss_difference in printed["loss_differences"]} == {"allreduce"}, (
        "one process may train otherwise"
    )


def test_the_answer(compared: tuple[ExperimentRecord, dict[str, Any]]) -> None:
    _, printed = compared
    assert printed["reference"] == "ddp"
    assert {row["name"]: row["role"] for row in printed["rows"]} == {
        "allreduce": "candidate",
        "ddp": "candidate",
        "none": "bound",
        "single": "baseline",
    }
    assert all(row["samples_per_s"]["value"] > 0 for row in printed["rows"])
    assert printed["next"].startswith("paceline compare --script train.py ")


def test_a_strategy_that_sums_is_found_out(tmp_path: Path) -> None:
    done = compare(tmp_path / "out", "--strategies", "schemes:Sums", expect=7)
    assert "schemes:Sums on 2 ranks: the gradient is 2 times the mean over the ranks" in done.stderr


def test_a_script_that_is_not_reproducible_is_measured_all_the_same(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = compare(out, "--strategies", "allreduce", args=("--mistake", "is not reproducible"))
    assert "train.py computes different gradients in two runs" in done.stderr
    assert "seed everything random" in done.stderr
    printed = json.loads(done.stdout)
    assert printed["proofs"] == []
    assert any("cannot be proven" in warning for warning in printed["warnings"])
    assert rows_of(done)["allreduce"]["step_s"]["value"] > 0


def test_a_script_that_clips_by_itself_is_named_in_a_caveat(tmp_path: Path) -> None:
    done = compare(tmp_path / "out", args=("--mistake", "clips by itself"), ranks=30)
    printed = json.loads(done.stdout)
    proven = {proof["candidate"]: proof["holds"] for proof in printed["proofs"]}
    assert all(proven.values())
    assert {"ddp", "allreduce", "shared_memory"} <= proven.keys(), "the default set"
    assert "was changed after backward had sent it" in done.stderr, "under priority"
    assert "priority" not in proven
    (caveat,) = [warning for warning in printed["warnings"] if "changes gradients between" in warning]
    names, _, reason = caveat.partition(": ")
    assert set(names.replace(" and ", ", ").split(", ")) == {
        name for name in proven if not create(name).agrees_in_backward
    }
    assert reason.startswith("train.py changes gradients between backward() and sync.step().")


def test_a_script_that_names_its_strategy(tmp_path: Path) -> None:
    done = compare(tmp_path / "out", args=("--mistake", "names its strategy"), expect=2)
    assert "train.py passes 'ddp' to attach(), so compare cannot choose the strategy." in done.stderr
    assert "hint: omit the strategy and its options in attach()" in done.stderr


def test_a_script_that_never_attaches(tmp_path: Path) -> None:
    done = compare(tmp_path / "out", args=("--mistake", "never attaches"), expect=4)
    assert "train.py ended without calling paceline.attach()." in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_that_ends_early(tmp_path: Path) -> None:
    done = compare(tmp_path / "out", "--no-proof", "--strategies", "none", args=("--steps", "9"), expect=4)
    assert f"train.py ended after 9 of {STEPS} steps." in done.stderr
    assert "--steps" in done.stderr


def test_a_script_that_refuses_its_arguments(tmp_path: Path) -> None:
    done = compare(tmp_path / "out", args=("--mistkae", "none"), expect=4)
    assert "unrecognized arguments: --mistkae none" in done.stderr
    assert "error: train.py ended with exit code 2." in done.stderr


def test_a_strategy_under_which_the_script_fails_is_left_out(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--no-proof", "--strategies", "allreduce,none", "--vary", "bn=local")
    done = compare(out, *options, args=("--quiet", "--mistake", "fails under allreduce"))
    assert "sample 17 is damaged" in done.stderr
    rows = rows_of(done)
    assert "ValueError: sample 17 is damaged" in rows["allreduce bn=local"]["failure"]
    assert rows["none bn=local"]["step_s"]["value"] > 0
    assert rows["none bn=local"]["train_loss"] is None, "a script need not tell its loss"
    record = runs_of(out)["none bn=local"]
    assert record.config["bn"] == "local"
    assert record.summary.ranks[0].diverged_step is None


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["--lr", "0.3"], "--lr was given together with --script.", "after `--`"),
        (["resnet18"], "WORKLOAD was given together with --script.", "after `--`"),
        (["--batch", "8"], "--batch was given together with --script.", "after `--`"),
        (["--epochs", "2"], "--epochs was given together with --script.", "--steps"),
        (["--steps", "5"], "--steps 5 leaves no step to measure", "--steps 40"),
        (["--vary", "lr=1,2"], "--vary cannot vary lr.", "vary bn or allow_unused"),
        (["--vary", "strategy=ddp,none"], "--vary cannot vary strategy.", "--strategies"),
        (["--strategies", "dpd"], "there is no strategy 'dpd'.", "did you mean 'ddp'?"),
        (["--script", "gone.py"], "there is no script gone.py in ", "the path of a Python file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_go_together(
    arguments: list[str], error: str, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(SCRIPTS)
    assert run(["compare", "--script", "train.py", *arguments, "--", "--lr", "3"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"error: {error}")
    assert hint in lines[1]
    assert not Path("runs").exists()


def test_arguments_without_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", "cnn", "--", "--lr", "3"]) == 2
    assert "--lr 3 was given after `--`, but there is no --script." in capsys.readouterr().err
