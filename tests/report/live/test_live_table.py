"""Tests of the live display of a comparison."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from experiments_on_disk import read_comparison, write_experiment
from large_batches_on_disk import read_large_batches, write_large_batches
from paceline.analysis.remaining_time import Part, TimeEstimator
from paceline.config import RunConfig
from paceline.errors import DivergenceError, RankError
from paceline.records import EventWriter, RunFolder, StepRow, StepWriter
from paceline.records.events import EvaluationEvent, StartEvent
from paceline.records.parity import Parity
from paceline.records.summary import EvaluationResult
from paceline.report.live.large_batch_table import LargeBatchLiveTable
from paceline.report.live.live_table import LiveTable, format_plan, format_proof
from paceline.report.live.scaling_table import format_points_plan
from run_models import batch_design, compare_design, large_batch_design

DESIGN = compare_design(repeats=3, max_repeats=10, batch=256)
CANDIDATES = ["single", "ddp"]
RUN = Part("run", "ddp")


@dataclass(frozen=True)
class FakeRun:
    name: str
    folder: Path


def display(*, terminal: bool) -> tuple[LiveTable, io.StringIO]:
    stream = io.StringIO()
    return LiveTable(Console(file=stream, force_terminal=terminal, width=120, color_system=None)), stream


def until(holds: Callable[..., object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_plan_is_one_line() -> None:
    line = format_plan(DESIGN, CANDIDATES, RunConfig(steps=40), "3–10")
    assert line == "cnn on digits: single, ddp · 2 ranks × 1 thread, global batch 256 · 40 steps × 3–10 repeats"
    known = format_plan(replace(DESIGN, batch=None), CANDIDATES, RunConfig(epochs=1), "1")
    assert known == "cnn on digits: single, ddp · 2 ranks × 1 thread · 1 epoch × 1 repeat"


def test_the_plan_warns_of_ranks_that_share_cores() -> None:
    cases = {
        "3 ranks share 2 cores": {"emulated": "3@500mbit", "machine_cores": 2.0},
        "3 hosts with 1 core each share 2 cores": {"emulated": "3", "machine_cores": 2.0, "host_cpus": 1.0},
        "": {"emulated": "3", "machine_cores": 2.0, "host_cpus": 0.5},
        "3 ranks with 2 threads each share 4 cores": {"machine_cores": 4.0, "machines": [0, 0, 0], "threads": 2},
        None: {"machine_cores": 2.0, "machines": [0, 1, 2]},
    }
    for phrase, changes in cases.items():
        shown, stream = display(terminal=False)
        shown.plan(replace(DESIGN, ranks=3, hosts=3, ranks_per_host=1, **changes), CANDIDATES, RunConfig(steps=40))
        line = stream.getvalue().splitlines()[1:]
        assert [text.partition(": they take turns")[0] for text in line] == ([f"warning: {phrase}"] if phrase else [])


def test_an_unknown_time_is_said() -> None:
    shown, stream = display(terminal=False)
    estimator = TimeEstimator()
    estimator.expect("later", [RUN])
    shown.follow_time(estimator)
    assert stream.getvalue() == "time: unknown until the first runs have finished\n"


def test_format_proof() -> None:
    right = Parity("ddp", 2, 3e-8, 1.0, 1e-5, lossless=True, steps=3)
    assert format_proof(right) == "computes the same mean gradient as one process (relative error 3e-8, allowed 1e-5)"
    wrong = "does not compute the mean gradient of one process, although it promises to (relative error 0.50)"
    assert format_proof(replace(right, error=0.5)) == wrong
    assert "does not promise to" in format_proof(replace(right, error=0.5, lossless=False))
    assert "relative error ∞" in format_proof(replace(right, error=None))


def test_without_a_terminal_there_is_a_line_per_repeat_with_the_remaining_time(tmp_path: Path) -> None:
    shown, stream = display(terminal=False)
    shown.plan(DESIGN, CANDIDATES, RunConfig(steps=40))
    estimator = TimeEstimator({RUN: 30.0})
    estimator.expect("later", [RUN], 3, 10)
    shown.follow_time(estimator)
    with shown.launch("repeat 1", [], 40):
        pass
    comparison = read_comparison(write_experiment(tmp_path / "e"))
    estimator.measure(RUN, 20.0)
    estimator.expect("later", [RUN], 2, 9)
    shown.refresh(comparison, 1)
    estimator.expect("later", [RUN], 0, 7)
    shown.refresh(comparison, 3)
    estimator.expect("later", [])
    shown.refresh(comparison, 4)
    shown.failed("ddp", RankError("rank 1 failed", hint="look there", detail="Traceback"), left_out=True)
    output = stream.getvalue()
    assert "\ntime: about 40 s–3 min (up to 10 min if the result is close); this range is refined as runs" in output
    assert "after 1 repeat, 20–80 s (up to 6 min if the result is close) to go: " in output
    assert "after 3 repeats, up to 5 min to go: " in output
    assert "after 4 repeats: " in output
    assert output.endswith("ddp failed and is left out: rank 1 failed\nTraceback\nhint: look there\n")


def test_a_terminal_shows_the_current_run_and_the_results_so_far(tmp_path: Path) -> None:
    shown, stream = display(terminal=True)
    shown.plan(DESIGN, CANDIDATES, RunConfig(steps=40))
    estimator = TimeEstimator({RUN: 30.0})
    estimator.expect("later", [RUN])
    shown.follow_time(estimator)
    shown.refresh(read_comparison(write_experiment(tmp_path / "e")), 1)
    schedule = [FakeRun(name, tmp_path / name) for name in ("first [one]", "second")]
    with shown.launch("repeat 2", schedule, None):
        for scheduled in schedule:
            folder = RunFolder.create(scheduled.folder)
            events, steps = EventWriter(folder), StepWriter(folder, 0)
            events.write(StartEvent(steps=7, steps_per_epoch=None, dropped=0))
            steps.write([StepRow(step, 0, 4, 0.0, 0.1, 0.1, 0.1, 0.1, 2.0, 1) for step in range(3)])
            until(lambda name=scheduled.name: "3/7" in stream.getvalue().partition(name)[2])
            folder.mark_finished()
            events.close()
            steps.close()
        until(lambda: "2/2" in stream.getvalue())
    output = stream.getvalue()
    assert "so far" in output
    assert "allreduce" in output
    assert "first [one]" in output
    assert "second" in output
    assert "3/7" in output
    assert "repeat 2 of 3–10, 10–60 s to go" in output
    assert "2/2" in output


@pytest.mark.parametrize(
    ("changes", "threads"),
    [
        ({"single_threads": 2}, "1 and 2 ranks × 1 thread (single: 2 threads)"),
        ({"single_threads": 1}, "1 and 2 ranks × 1 thread"),
        ({"single_threads": None}, "1 and 2 ranks × 1 thread"),
        ({"single_threads": 2, "strategies": ["ddp"]}, "1 and 2 ranks × 1 thread"),
    ],
)
def test_the_plan_of_points_names_other_threads_of_single(changes: dict[str, Any], threads: str) -> None:
    line = format_points_plan(batch_design(**changes), "batches 64 and 128", RunConfig(steps=20))
    assert threads in line.split(" · ")


def test_without_a_terminal_each_run_with_large_batches_has_a_line(tmp_path: Path) -> None:
    """A repeat may take an hour there. A run that diverges has no result; `failed` prints why."""
    stream = io.StringIO()
    shown = LargeBatchLiveTable(Console(file=stream, width=200))
    shown.plan(large_batch_design(repeats=3, max_repeats=3), ["one", "two"], RunConfig(epochs=4))
    schedule = [FakeRun(name, tmp_path / name) for name in ("32 reference", "320 plain")]
    with shown.launch("repeat 1", schedule, None):
        folder = RunFolder.create(schedule[0].folder)
        events = EventWriter(folder)
        test = EvaluationResult(loss=0.25, accuracy=0.9, samples=10, available=10)
        events.write(EvaluationEvent(test=test, step=7, epoch=0))
        folder.mark_finished()
        events.close()
        until(lambda: "32 reference" in stream.getvalue().partition("repeat 1")[2])
    assert "repeat 1 of 3: 32 reference: test loss 0.2500, accuracy 90.0%\n" in stream.getvalue()
    assert "repeat 1 of 3: 320 plain" not in stream.getvalue()
    shown.failed("320 plain", DivergenceError("the loss is not finite.", hint="lower it"), left_out=False)
    assert stream.getvalue().endswith("320 plain failed with this seed: the loss is not finite.\n")
    found = read_large_batches(write_large_batches(tmp_path / "e", diverged=[("320 linear", n) for n in range(3)]))
    shown.refresh(found.comparison, 3)
    assert stream.getvalue().endswith(
        "after 3 repeats: 32 reference 90.0% · 320 plain 60.0% · 320 linear diverged · 320 warmup 60.0% · "
        "320 linear+warmup 89.0%\n"
    )
