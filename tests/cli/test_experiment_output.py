"""An unfinished experiment goes on in its folder: with records that a substitute for ranks writes, and with real ranks.

The substitute writes the records of a job as ranks would, and stops where a test says.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from commands import forked, paceline, wait_until
from examinations import examination
from experiments_on_disk import PROVENANCE, write_run
from paceline.analysis.comparison import compare
from paceline.analysis.record_set import collect_records
from paceline.cli import main
from paceline.cli.interrupts import CtrlCHandler
from paceline.config import RunConfig
from paceline.errors import RankError
from paceline.launch.job import Job
from paceline.launch.launcher_process import RankRange
from paceline.records import RunFolder
from paceline.records.events import ContinuedEvent, EndEvent, FailureEvent, InterruptedEvent, ParityEvent
from paceline.records.examination import write_examination
from paceline.records.experiment.design import Candidate
from paceline.records.experiment.record import ExperimentRecord, read_experiment
from paceline.records.parity import Parity
from paceline.records.reader import is_complete

pytestmark = pytest.mark.takes(20)

WHAT = ("--strategies", "single,allreduce,ddp", "--ranks", "2", "--batch", "32", "--steps", "8")
HOW = ("--repeats", "3", "--max-repeats", "3", "--no-doctor", "--no-proof")
COMPARE = ("compare", *WHAT, *HOW)
NAMES = ("single", "allreduce", "ddp")
Run = tuple[str, int]
"""Strategy and seed of a run."""


@dataclass
class Ranks:
    """Substitute for ranks: writes the records of jobs, and keeps what it was given."""

    runs: list[Run] = field(default_factory=list)
    """Runs that were trained, in order."""
    proven: list[str] = field(default_factory=list)
    examined: int = 0
    stop_at: Callable[[str, RunConfig], BaseException | None] = lambda _task, _config: None
    """Returns the exception to raise in the middle of a run."""

    def start(self, job: Job, part: RankRange, *_: Any, **__: Any) -> dict[int, int]:
        for number, (config, folder) in enumerate(job.runs):
            assert job.task == "examine" or not [path for path in folder.path.iterdir() if path.is_file()]
            error = self.stop_at(job.task, config)
            self._write(job, part, config, folder, whole=error is None)
            if isinstance(error, RankError):
                error.run = number
            if error is not None:
                raise error
        return {}

    def _write(self, job: Job, part: RankRange, config: RunConfig, folder: RunFolder, *, whole: bool) -> None:
        if job.task == "prove":
            self.proven.append(config.strategy)
            if whole:
                folder.write_parity(Parity(config.strategy, 2, 0.0, 1.0, 1e-5, lossless=True, steps=3))
        elif job.task == "train":
            self.runs.append((config.strategy, config.seed))
            losses = [1 / (1 + step) for step in range(config.steps or 0)]
            candidate = Candidate(config.strategy, config.strategy)
            write_run(folder.path, candidate, config, part.ranks, losses, 0.01, None, PROVENANCE)
            if not whole:
                (folder.path / "finished").unlink()
                (folder.path / "cut-off").touch()
        else:
            self.examined += 1
            if whole:
                write_examination(folder.path, examination())


@pytest.fixture(autouse=True)
def _work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Substitute for ranks in the commands of a test, which make no estimates and render no page."""
    for module in ("training_targets", "scale"):
        monkeypatch.setattr(f"paceline.experiments.{module}.run_trials", lambda _: {})
    for module in ("training_targets", "points"):
        monkeypatch.setattr(f"paceline.experiments.{module}.prepare_data", lambda _: None)
    monkeypatch.setattr("paceline.report.page.comparison.render", lambda _: "page")
    monkeypatch.setattr("paceline.report.page.scaling.render_scaling", lambda _: "page")
    monkeypatch.setattr("paceline.cli.interrupts.REPEAT_WINDOW_S", 0.0)
    made = Ranks()
    monkeypatch.setattr("paceline.launch.leader.start_ranks", made.start)
    return made


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run a command in this process; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
    monkeypatch.setattr(CtrlCHandler, "_raised_s", 0.0)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as exited:
            main(list(arguments))
    finally:
        signal.signal(signal.SIGINT, before)
    return int(exited.value.code or 0)


def ctrl_c_at(strategy: str, seed: int) -> Callable[[str, RunConfig], BaseException | None]:
    return lambda task, config: (
        KeyboardInterrupt() if task == "train" and (config.strategy, config.seed) == (strategy, seed) else None
    )


def check_whole(out: Path, runs: int = 9) -> ExperimentRecord:
    """Check that an experiment is finished, with complete runs only."""
    experiment = read_experiment(out)
    assert experiment.finished
    assert len(experiment.runs) == runs
    assert all(is_complete(one.run.path) for one in experiment.runs)
    assert not list(out.glob("repeat-*/**/cut-off"))
    assert not [kind for kind in (InterruptedEvent, FailureEvent) if experiment.events_of(kind)]
    return experiment


def test_the_same_command_goes_on_where_it_was(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The second repeat is trained in the order allreduce, ddp, single, and cut off in ddp."""
    ranks.stop_at = ctrl_c_at("ddp", 1)
    assert run(monkeypatch, *COMPARE, "--out", "my out") == 130
    printed = capfd.readouterr()
    assert printed.err.splitlines()[-1] == f"to go on: paceline {' '.join(COMPARE)} --out 'my out'"
    before = list(ranks.runs)
    ranks.runs, ranks.stop_at = [], Ranks.stop_at
    assert run(monkeypatch, *COMPARE, "--out", "my out") == 0
    printed = capfd.readouterr()
    assert "goes on in my out: 4 of 9 runs are there" in printed.err
    assert "to go on" not in printed.err
    assert ranks.runs == [("ddp", 1), ("single", 1), ("ddp", 2), ("single", 2), ("allreduce", 2)]
    assert before[:4] == [("single", 0), ("allreduce", 0), ("ddp", 0), ("allreduce", 1)]
    experiment = check_whole(Path("my out"))
    assert [path.name for path in Path("my out/incomplete-1/repeat-2").iterdir()] == ["3-ddp"]
    (continued,) = experiment.events_of(ContinuedEvent)
    assert len(continued.kept) == 4
    assert continued.provenance.command == f"paceline {' '.join(COMPARE)} --out 'my out'"
    times = [event.time_s for event in experiment.events]
    assert times == sorted(times)


def test_runs_of_a_repeat_that_was_cut_are_not_timed_together(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.stop_at = ctrl_c_at("ddp", 1)
    assert run(monkeypatch, *COMPARE, "--out", "out") == 130
    ranks.stop_at = Ranks.stop_at
    assert run(monkeypatch, *COMPARE, "--out", "out") == 0
    record_set = collect_records([read_experiment(Path("out"))])
    keys = {name: [one.timing_key for one in record_set.recorded_runs_of(name)] for name in NAMES}
    assert keys["ddp"] == keys["single"]
    assert [one == other for one, other in zip(keys["ddp"], keys["allreduce"], strict=True)] == [True, False, True]
    assert {one.repeat for one in record_set.runs} == {(0, 0), (0, 1), (0, 2)}, "losses are paired by repeat"
    comparison = compare(record_set)
    rows = {row.candidate.name: row for row in comparison.rows}
    assert {name: (row.repeats, row.ratio and row.ratio.repeats) for name, row in rows.items()} == {
        "single": (3, 3),
        "allreduce": (3, 2),
        "ddp": (3, 3),
    }
    assert any(warning.startswith("Repeat 2 was measured in parts") for warning in comparison.warnings)
    assert not comparison.interrupted


@pytest.mark.parametrize("by", ["default", "option"])
def test_the_command_to_go_on_is_printed(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], by: str
) -> None:
    ranks.stop_at = ctrl_c_at("single", 0)
    arguments = COMPARE if by == "default" else ("compare", "--out=x y", *COMPARE[1:])
    assert run(monkeypatch, *arguments, "--json") == 130
    (folder,) = Path("runs").iterdir() if by == "default" else [Path("x y")]
    printed = capfd.readouterr()
    named = f"'{folder}'" if " " in str(folder) else str(folder)
    assert printed.err.splitlines()[-1] == f"to go on: paceline {' '.join(COMPARE)} --json --out {named}"
    assert json.loads(printed.out)["interrupted"]


def test_the_report_and_the_next_command_are_printed_last(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *COMPARE, "--out", "e") == 0
    *_, report, command = capfd.readouterr().out.splitlines()
    assert report == "report: e/report.html"
    assert command.startswith("next:   paceline train ")
    assert len(ranks.runs) == 9


def test_scaling_goes_on(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    scale = ("scale", "--strategies", "ddp", "--ranks", "1,2", "--batch-per-rank", "16", "--mode", "weak")
    arguments = (*scale, "--steps", "8", "--repeats", "2", "--no-doctor", "--no-proof", "--out", "out")
    seen: list[Run] = []

    def stop_at_the_fourth(_: str, config: RunConfig) -> BaseException | None:
        seen.append((config.strategy, config.seed))
        return KeyboardInterrupt() if len(seen) == 5 else None

    ranks.stop_at = stop_at_the_fourth
    assert run(monkeypatch, *arguments) == 130
    ranks.stop_at = Ranks.stop_at
    ranks.runs.clear()
    assert run(monkeypatch, *arguments) == 0
    assert "goes on in out: 4 of 6 runs are there" in capfd.readouterr().err
    assert len(ranks.runs) == 2
    check_whole(Path("out"), runs=6)


def test_the_examination_and_the_proofs_are_kept(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("compare", *WHAT, "--repeats", "1", "--max-repeats", "1", "--out", "out")
    ranks.stop_at = lambda task, _: KeyboardInterrupt() if task == "examine" else None
    assert run(monkeypatch, *arguments) == 130
    ranks.stop_at = lambda task, config: KeyboardInterrupt() if (task, config.strategy) == ("prove", "ddp") else None
    assert run(monkeypatch, *arguments) == 130
    assert (ranks.examined, ranks.proven) == (2, ["single", "allreduce", "ddp"])
    ranks.stop_at = ctrl_c_at("single", 0)
    assert run(monkeypatch, *arguments) == 130
    ranks.stop_at = Ranks.stop_at
    assert run(monkeypatch, *arguments) == 0
    assert (ranks.examined, ranks.proven) == (2, ["single", "allreduce", "ddp", "ddp"])
    experiment = check_whole(Path("out"), runs=3)
    assert experiment.examination is not None
    assert [event.candidate for event in experiment.events_of(ParityEvent)] == list(NAMES)
    assert len(experiment.events_of(ContinuedEvent)) == 3
    assert len({one.part for one in experiment.runs}) == 1, "no run was complete before"


def test_a_candidate_that_failed_is_tried_again(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail_then_stop(_: str, config: RunConfig) -> BaseException | None:
        if config.strategy == "allreduce":
            return RankError("rank 1 failed.")
        return KeyboardInterrupt() if (config.strategy, config.seed) == ("single", 1) else None

    ranks.stop_at = fail_then_stop
    assert run(monkeypatch, *COMPARE, "--out", "out") == 130
    assert len(read_experiment(Path("out")).events_of(FailureEvent)) == 1
    ranks.stop_at = Ranks.stop_at
    ranks.runs.clear()
    assert run(monkeypatch, *COMPARE, "--out", "out") == 0
    assert "are there; tried again: allreduce, which failed" in capfd.readouterr().err
    assert ranks.runs[0] == ("allreduce", 0)
    assert ranks.runs.count(("allreduce", 0)) == 1
    check_whole(Path("out"))


def test_a_candidate_that_fails_again_is_left_out(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_then_stop(_: str, config: RunConfig) -> BaseException | None:
        if config.strategy == "allreduce":
            return RankError("rank 1 failed.")
        return KeyboardInterrupt() if (config.strategy, config.seed) == ("single", 1) and stops.pop() else None

    stops = [False, True]
    ranks.stop_at = fail_then_stop
    assert run(monkeypatch, *COMPARE, "--out", "out") == 130
    ranks.runs.clear()
    assert run(monkeypatch, *COMPARE, "--out", "out") == 0
    assert [one for one in ranks.runs if one[0] == "allreduce"] == [("allreduce", 0)]
    experiment = read_experiment(Path("out"))
    assert [event.candidate for event in experiment.events_of(FailureEvent)] == ["allreduce"]
    assert experiment.finished


def test_a_finished_experiment_goes_on_with_more_repeats_only(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *COMPARE, "--out", "my out") == 0
    before = {path: path.read_bytes() for path in Path("my out").rglob("*") if path.is_file()}
    ranks.runs.clear()
    assert run(monkeypatch, *COMPARE, "--out", "my out") == 8
    said = capfd.readouterr().err
    assert "my out contains this experiment already; it is finished, with 9 runs." in said
    assert "`paceline report 'my out'` shows it; larger --repeats and --max-repeats measure more" in said
    assert ranks.runs == []
    assert {path: path.read_bytes() for path in Path("my out").rglob("*") if path.is_file()} == before
    assert run(monkeypatch, *COMPARE, "--repeats", "4", "--max-repeats", "4", "--out", "my out") == 0
    assert "goes on in my out: 9 of 12 runs are there" in capfd.readouterr().err
    assert ranks.runs == [("single", 3), ("allreduce", 3), ("ddp", 3)]
    experiment = check_whole(Path("my out"), runs=12)
    assert (experiment.design.repeats, experiment.design.interim_analyses) == (4, 2)
    assert len(experiment.events_of(EndEvent)) == 1


def test_other_settings_are_refused_and_nothing_is_lost(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks.stop_at = ctrl_c_at("ddp", 1)
    assert run(monkeypatch, *COMPARE, "--out", "out") == 130
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    capfd.readouterr()
    assert run(monkeypatch, *COMPARE, "--out", "out", "--lr", "0.2", "--strategies", "ddp,p2p") == 8
    said = capfd.readouterr().err
    assert "--lr not set (now 0.2); now without allreduce and single; now with p2p." in said
    assert f"go on with the original command: `paceline {' '.join(COMPARE)} --out out`" in said
    scale = ("scale", "--strategies", "ddp", "--ranks", "1,2", "--steps", "8", "--out", "out")
    assert run(monkeypatch, *scale) == 8
    assert "already contains a record: an experiment of `paceline compare`" in capfd.readouterr().err
    assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == before
    ranks.stop_at = Ranks.stop_at
    free = ("--timeout", "60", "--data-dir", "data", "--json")
    assert run(monkeypatch, *COMPARE, *free, "--out", "out") == 0, "these settings change no measurement"
    check_whole(Path("out"))


def test_real_runs_go_on_after_kill_and_after_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run is held in the middle while a file exists, so both signals arrive during that run."""
    hold, out = tmp_path / "hold", tmp_path / "my out"
    hold.touch()
    monkeypatch.setenv("PACELINE_TEST_HOLD", str(hold))
    what = ("compare", "user_workloads:plain", "--strategies", "allreduce,schemes:Held,ddp", "--ranks", "2")
    how = ("--batch", "16", "--steps", "20", "--repeats", "2", "--max-repeats", "2", "--no-doctor", "--no-proof")
    arguments = (*what, *how, "--out", str(out))
    begun = out / "repeat-1/2-schemes-Held/run.json"

    with forked(*arguments) as killed:
        wait_until(begun.exists, "the second run has begun")
        os.killpg(killed.pid, signal.SIGKILL)
    kept = {path: path.stat().st_mtime_ns for path in out.glob("repeat-1/1-allreduce/*") if path.is_file()}

    with forked(*arguments) as stopped:
        wait_until(lambda: (out / "incomplete-1").exists() and begun.exists(), "the second run has begun again")
        refused = paceline(*arguments, expect=8)
        assert f"error: another process is measuring in {out}." in refused.stderr
        os.killpg(stopped.pid, signal.SIGINT)
        printed = stopped.wait()
    assert printed.returncode == 130, printed
    assert f"goes on in {out}: 1 of 6 runs are there" in printed.stderr
    assert f"to go on: paceline {' '.join((*what, *how))} --out '{out}'" in printed.stderr
    assert (out / "report.html").is_file()

    hold.unlink()
    done = paceline(*arguments, "--json")
    assert f"goes on in {out}: 1 of 6 runs are there" in done.stderr
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "the first run was not trained again"
    experiment = check_whole(out, runs=6)
    found = sorted((one.repeat, one.run.config["seed"], len(one.run.steps[0])) for one in experiment.runs)
    assert found == [(0, 0, 20)] * 3 + [(1, 1, 20)] * 3
    assert sorted(path.parts[-4] for path in out.glob("incomplete-*/*/*/run.json")) == ["incomplete-1", "incomplete-2"]
    result = json.loads(done.stdout)
    assert {row["name"]: row["repeats"] for row in result["rows"]} == {"allreduce": 2, "schemes:Held": 2, "ddp": 2}
    assert not result["interrupted"]


def test_a_script_goes_on(tmp_path: Path) -> None:
    """Each run of a script has ranks of its own; the proof of the strategies needs the oracle again."""
    out = tmp_path / "out"
    script = ("--script", "scripts/train.py", "--strategies", "allreduce,ddp", "--ranks", "2", "--steps", "8")
    arguments = ("compare", *script, "--no-doctor", "--repeats", "1", "--max-repeats", "1", "--out", str(out), "--")
    with forked(*arguments, "--steps", "900") as killed:
        wait_until(lambda: list(out.glob("proof/*/parity.json")), "a proof")
        os.killpg(killed.pid, signal.SIGKILL)
        assert killed.wait().returncode == -signal.SIGKILL
    done = paceline(*arguments, "--steps", "900")
    assert "goes on in" in done.stderr
    experiment = check_whole(out, runs=2)
    assert [event.candidate for event in experiment.events_of(ParityEvent)] == ["allreduce", "ddp"]
    assert "other settings" in paceline(*arguments, "--steps", "901", expect=8).stderr
