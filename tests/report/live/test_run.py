"""Tests of the live display of a run, which follows a growing record."""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict, replace
from rich.console import Console

from paceline.analysis.remaining_time import RemainingTime
from paceline.records import EventWriter, RunDescription, RunFolder, StepRow, StepWriter
from paceline.records.description import RecordedEmulation
from paceline.records.events import ConfigEvent, CudaGraphEvent, EpochEvent, EvaluationEvent, LogEvent, StartEvent
from paceline.records.schema import ResourceRow
from paceline.records.summary import EvaluationResult
from paceline.records.writer import ResourceWriter, encode
from paceline.report.live import run as live
from paceline.report.live.run import GpuTail, LiveRun, Tail, configuration_line
from run_models import PROVENANCE, recipe, recorded_settings, topology

TOPOLOGY = topology(3, batch=64, batch_per_rank=[21, 22], cores=4.0, parameters=53_762)
EMULATED = RecordedEmulation(spec="3@500mbit", host_cpus=None)
LOG: dict[str, Any] = {"step": 20, "epoch": 0, "losses": [2.5, 1.25], "samples": 1280, "correct": 960, "wall_s": 0.5}


def config_event(**changes: Any) -> ConfigEvent:
    return ConfigEvent(**asdict(replace(TOPOLOGY, **changes)))


def console(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=160, force_terminal=terminal, color_system=None), out


def row(step: int) -> StepRow:
    return StepRow(step, 0, 22, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1)


def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "POLL_S", 0.005)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run")


def test_a_tail_returns_each_line_once_and_complete(tmp_path: Path) -> None:
    file = tmp_path / "grows"
    tail = Tail(file)
    assert tail.new_lines() == []
    seen: list[str] = []
    text = "first\nsecond, ä\n\nlast\n"
    with file.open("wb") as stream:
        for byte in text.encode():
            stream.write(bytes([byte]))
            stream.flush()
            seen += tail.new_lines()
    assert seen == ["first", "second, ä", "", "last"]
    assert tail.new_lines() == []


def test_the_latest_readings_of_a_gpu(tmp_path: Path) -> None:
    tail = GpuTail(tmp_path / "resources-0.csv")
    assert tail.latest() == ""
    writer = ResourceWriter(RunFolder(tmp_path), 0)
    base = ResourceRow(0, 0, 100, 4, 0, 5, 6, None, None, None)
    writer.write([base])
    assert tail.latest() == ""
    writer.write([base._replace(gpu_busy=0.5, gpu_power_w=300.0), base._replace(gpu_busy=0.931, gpu_power_w=412.3)])
    assert tail.latest() == "GPU 93%, 412 W"
    assert tail.latest() == "GPU 93%, 412 W"
    writer.write([base._replace(gpu_power_w=99.6)])
    assert tail.latest() == "GPU 100 W"
    writer.close()


def test_events_are_printed_as_they_are_written(folder: RunFolder) -> None:
    screen, out = console()
    with LiveRun(folder.path, screen):
        time.sleep(0.02)  # The record is still empty: the ranks are starting.
        events = EventWriter(folder)
        events.write(config_event())
        until(lambda: "cnn on digits" in out.getvalue())
        events.write(StartEvent(steps=100, steps_per_epoch=None, dropped=5))
        until(lambda: "each epoch leaves out 5 samples" in out.getvalue())
        events.write(LogEvent(**LOG))
        until(lambda: "step     20" in out.getvalue())
        events.close()
    lines = out.getvalue().splitlines()
    assert lines[0] == configuration_line(TOPOLOGY).replace("[bold]", "").replace("[/bold]", "")
    assert lines[1] == "each epoch leaves out 5 samples, too few for a batch on all ranks"
    assert lines[2] == "step     20  epoch   1  loss 1.2500 accuracy 75.0% 2,560 samples/s"
    assert len(lines) == 3


def test_reasons_against_cuda_graphs_are_printed_unless_they_were_expected(folder: RunFolder) -> None:
    screen, out = console()
    with LiveRun(folder.path, screen):
        events = EventWriter(folder)
        events.write(CudaGraphEvent(used=False, reason="expected.", is_expected=True))
        events.write(CudaGraphEvent(used=False, reason="the losses differ."))
        events.write(CudaGraphEvent(used=True, reason="batches differ."))
        events.close()
    assert out.getvalue().splitlines() == [
        "without CUDA graphs: the losses differ.",
        "only some steps are replayed from CUDA graphs: batches differ.",
    ]


def test_the_last_events_are_printed_after_the_end(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "POLL_S", 60)
    screen, out = console()
    with LiveRun(folder.path, screen):
        events = EventWriter(folder)
        events.write(LogEvent(**LOG))
        events.close()
        assert out.getvalue() == ""
    assert out.getvalue().count("loss 1.2500") == 1


def test_an_incomplete_line_is_not_printed_until_it_is_complete(folder: RunFolder) -> None:
    screen, out = console()
    line = json.dumps({"event": "log", "time_s": 0.0, **LOG}) + "\n"
    with LiveRun(folder.path, screen), (folder.path / "events.jsonl").open("w") as stream:
        stream.write(line[:30])
        stream.flush()
        time.sleep(0.03)
        assert out.getvalue() == ""
        stream.write(line[30:])
        stream.flush()
        until(lambda: "loss 1.2500" in out.getvalue())
    assert out.getvalue().count("loss 1.2500") == 1


def test_each_step_has_its_own_epoch_where_a_window_has_several(folder: RunFolder) -> None:
    screen, out = console()
    with LiveRun(folder.path, screen):
        events = EventWriter(folder)
        events.write(LogEvent(**(LOG | {"step": 21, "epoch": 3, "epochs": [2, 3]})))
        events.close()
    assert out.getvalue().startswith("step     20  epoch   3  loss 2.5000")


def test_a_workload_without_correct_predictions_has_no_accuracy(folder: RunFolder) -> None:
    screen, out = console()
    with LiveRun(folder.path, screen):
        events = EventWriter(folder)
        events.write(LogEvent(**(LOG | {"correct": None})))
        events.close()
    assert "loss 1.2500 2,560 samples/s" in out.getvalue()
    assert "accuracy" not in out.getvalue()


def evaluation(step: int | None, loss: float | None, accuracy: float | None) -> EvaluationEvent:
    test = EvaluationResult(loss=loss, accuracy=accuracy, samples=8, available=8)
    return EvaluationEvent(step=step, epoch=None if step is None else step // 40, test=test)


def lines_of(folder: RunFolder, *written: Any) -> list[str]:
    """Return what is printed of evaluations."""
    screen, out = console()
    with LiveRun(folder.path, screen):
        events = EventWriter(folder)
        for event in written:
            events.write(event)
        events.close()
    return [line for line in out.getvalue().splitlines() if "test" in line]


def test_evaluations_are_printed_with_the_learning_rate(folder: RunFolder) -> None:
    lines = lines_of(
        folder,
        StartEvent(steps=150, steps_per_epoch=40, dropped=0),
        LogEvent(**(LOG | {"step": 119, "lr": 0.05})),
        evaluation(119, 0.41, 0.881),
        evaluation(120, None, None),
        evaluation(150, 0.4, 0.9),
        evaluation(150, 0.4, 0.9),  # Once more, with those of the replicas.
    )
    assert lines == [
        "step    119  epoch   3  test loss 0.4100, accuracy 88.1%, lr 0.05",
        "step    120  epoch   4  test loss not finite, lr 0.05",
        "step    150  epoch   4  test loss 0.4000, accuracy 90.0%, lr 0.05",
    ]


@pytest.mark.parametrize("step", [150, None])
def test_the_only_evaluation_is_left_to_the_summary(folder: RunFolder, step: int | None) -> None:
    start = StartEvent(steps=150, steps_per_epoch=40, dropped=0)
    assert lines_of(folder, start, evaluation(step, 0.4, 0.9)) == []


def test_an_epoch_that_leaves_nothing_out_prints_nothing(folder: RunFolder) -> None:
    screen, out = console()
    with LiveRun(folder.path, screen):
        events = EventWriter(folder)
        events.write(StartEvent(steps=3, steps_per_epoch=None, dropped=0))
        events.close()
        with (folder.path / "events.jsonl").open("a") as file:
            file.write('{"event": "unheard of", "value": 1}\n')
    assert out.getvalue() == ""


def test_quiet_is_quiet(folder: RunFolder) -> None:
    screen, out = console(terminal=True)
    with LiveRun(folder.path, screen, quiet=True):
        events = EventWriter(folder)
        events.write(config_event())
        events.write(LogEvent(**LOG))
        events.close()
    assert out.getvalue() == ""


def test_in_a_terminal_a_bar_counts_the_steps_of_rank_0(folder: RunFolder) -> None:
    screen, out = console(terminal=True)
    with LiveRun(folder.path, screen):
        until(lambda: "starting ranks" in out.getvalue())
        events, steps = EventWriter(folder), StepWriter(folder, 0)
        events.write(StartEvent(steps=7, steps_per_epoch=None, dropped=0))
        steps.write([row(0), row(1)])
        until(lambda: "training" in out.getvalue())
        until(lambda: "2/7" in out.getvalue())
        steps.write([row(2)])
        until(lambda: "3/7" in out.getvalue())
        events.write(EpochEvent(epoch=0, step=3, buffer_divergence=None))
        until(lambda: "trained 1 epoch" in out.getvalue())
        events.close()
        steps.close()


def test_an_error_inside_passes_through(folder: RunFolder) -> None:
    screen, out = console()

    def fail() -> None:
        with LiveRun(folder.path, screen):
            events = EventWriter(folder)
            events.write(LogEvent(**LOG))
            events.close()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert "loss 1.2500" in out.getvalue(), "earlier events are shown"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (
            {},
            "[bold]cnn on digits[/bold], 53.8 k parameters · ddp on 3 ranks · batch 64 = 3 × 21–22 · sgd, lr 0.1",
        ),
        ({"recipe": recipe(schedule="cosine", warmup_epochs=2.5)}, "· sgd, lr 0.1, cosine, warm-up of 2.5 epochs ·"),
        ({"recipe": recipe(warmup_epochs=1.0, warmup_steps=50)}, "constant, warm-up of 1 epoch, at least 50 steps ·"),
        ({"recipe": recipe(warmup_steps=1)}, "constant, warm-up of 1 step ·"),
        ({"lr": 0.2, "recipe": recipe(scale_lr="linear", reference_batch=32)}, "sgd, lr 0.2 = 0.1 × 64 ÷ 32, constant"),
        ({"lr": 0.05, "recipe": recipe(scale_lr="sqrt", reference_batch=256)}, "lr 0.05 = 0.1 × √(64 ÷ 256), constant"),
        ({"recipe": recipe(schedule="")}, "· sgd, lr 0.1, own schedule ·"),
        ({"recipe": None}, "· user-defined optimiser ·"),
        ({}, "1 thread per rank · cpu, gloo over lo"),
        ({"batch": 66, "batch_per_rank": [22]}, "batch 66 = 3 × 22 ·"),
        ({"batch": None, "batch_per_rank": []}, "· batches from the workload ·"),
        ({"workers": 1, "strategy": "single"}, "single on 1 rank (2 idle) ·"),
        ({"user_optimizer": True}, "· user-defined optimiser ·"),
        ({"threads": 4}, "4 threads per rank"),
        ({"precision": "fp16"}, "sgd, lr 0.1, constant · fp16 · 1 thread"),
        ({"precision": "fp32"}, "sgd, lr 0.1, constant · 1 thread"),
    ],
)
def test_the_configuration_line(change: dict[str, Any], part: str) -> None:
    assert part in configuration_line(replace(TOPOLOGY, **change))


def test_losses_are_printed_at_log_intervals_and_at_the_end(folder: RunFolder) -> None:
    screen, out = console()
    with LiveRun(folder.path, screen):
        events = EventWriter(folder)
        events.write(config_event())
        events.write(StartEvent(steps=47, steps_per_epoch=None, dropped=0))
        for last, count in ((23, 23), (46, 23), (47, 1)):
            events.write(LogEvent(**(LOG | {"step": last, "losses": [float(last)] * count})))
        events.close()
    assert [line.split()[1] for line in out.getvalue().splitlines()[1:]] == ["20", "40", "47"]


def test_a_loss_that_is_not_finite_is_reported(folder: RunFolder) -> None:
    screen, out = console()
    with LiveRun(folder.path, screen):
        events = EventWriter(folder)
        events.write(config_event())
        events.write(StartEvent(steps=20, steps_per_epoch=None, dropped=0))
        events.write(LogEvent(**(LOG | {"step": 20, "losses": [math.nan] * 20})))
        events.close()
    assert "loss not finite" in out.getvalue()


def test_skipped_steps_are_reported(folder: RunFolder) -> None:
    screen, out = console()
    with LiveRun(folder.path, screen):
        events = EventWriter(folder)
        events.write(config_event())
        events.write(StartEvent(steps=20, steps_per_epoch=None, dropped=0))
        events.write(LogEvent(**(LOG | {"step": 20, "losses": [1.0] * 20, "skipped": [4, 7]})))
        events.close()
    assert "step      8  skipped the update of 2 steps: gradients were not finite" in out.getvalue()


@pytest.mark.parametrize(
    ("changes", "sharing"),
    [
        ({"cores": 4.0}, None),
        ({"cores": 3.0}, None),
        ({"cores": 2.0}, "3 ranks share 2 cores"),
        ({"cores": 0.5}, "3 ranks share 0.5 cores"),
        ({"cores": 4.0, "threads": 2}, "3 ranks with 2 threads each share 4 cores"),
        ({"cores": 2.0, "ranks_per_host": 1}, None),
        ({"cores": 2.0, "ranks_per_host": 1, "emulated": EMULATED}, "3 ranks share 2 cores"),
        ({"cores": 0.5, "ranks_per_host": 1, "emulated": replace(EMULATED, host_cpus=0.5)}, None),
    ],
)
def test_over_subscribed_cores_are_reported(folder: RunFolder, changes: dict[str, Any], sharing: str | None) -> None:
    screen, out = console()
    with LiveRun(folder.path, screen):
        events = EventWriter(folder)
        events.write(config_event(**changes))
        events.close()
    assert ("share" in out.getvalue()) == (sharing is not None)
    assert sharing is None or f"warning: {sharing}: they take turns, so times compare" in out.getvalue()


def test_the_remaining_time_of_training_is_a_range_without_the_warm_up(folder: RunFolder) -> None:
    screen, out = console(terminal=True)
    with LiveRun(folder.path, screen):
        events, steps = EventWriter(folder), StepWriter(folder, 0)
        events.write(StartEvent(steps=100, steps_per_epoch=None, dropped=0))
        events.write(LogEvent(**(LOG | {"step": 20, "losses": [1.0] * 20, "wall_s": 10.0})))
        steps.write([row(step) for step in range(20)])
        until(lambda: "20–80 s left" in out.getvalue())
        events.write(LogEvent(**(LOG | {"step": 40, "losses": [1.0] * 20, "wall_s": 5.0})))
        steps.write([row(step) for step in range(20, 40)])
        until(lambda: "5–30 s left" in out.getvalue())
        events.close()
        steps.close()


def described(folder: RunFolder, **settings: Any) -> None:
    """Write the description of a run with some settings."""
    folder.write_run(RunDescription(config=recorded_settings(**settings), topology=TOPOLOGY, provenance=PROVENANCE))


def test_a_run_that_ends_by_time_counts_down_the_time(folder: RunFolder) -> None:
    screen, out = console(terminal=True)
    described(folder, epochs=100, seconds=20.0)
    with LiveRun(folder.path, screen):
        events, steps = EventWriter(folder), StepWriter(folder, 0)
        events.write(config_event())
        events.write(StartEvent(steps=10_000, steps_per_epoch=None, dropped=0))
        for number in range(3):
            events.write(LogEvent(**(LOG | {"step": 20 * (number + 1), "losses": [1.0] * 20, "wall_s": 5.0})))
            steps.write([row(step) for step in range(20 * number, 20 * (number + 1))])
        until(lambda: "5 s left" in out.getvalue())
        events.close()
        steps.close()
    assert "min left" not in out.getvalue()


def test_the_remaining_time_counts_evaluations(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 steps of 0.1 s remain, and two evaluations of 30 s each."""
    screen, _ = console()
    described(folder, steps=30, eval_every="5")
    live_run = LiveRun(folder.path, screen)
    tested = EvaluationResult(loss=1.0, accuracy=0.5, samples=360, available=360)
    lines = [
        config_event(),
        StartEvent(steps=30, steps_per_epoch=None, dropped=0),
        LogEvent(**(LOG | {"step": 10, "losses": [1.0] * 10, "wall_s": 1.0, "time_s": 1.0})),
        EvaluationEvent(step=10, epoch=0, test=tested, time_s=31.0),
        LogEvent(**(LOG | {"step": 20, "losses": [1.0] * 10, "wall_s": 1.0, "time_s": 32.0})),
        EvaluationEvent(step=20, epoch=0, test=tested, time_s=62.0),
    ]
    (folder.path / "events.jsonl").write_bytes(b"".join(encode(line) + b"\n" for line in lines))
    steps = StepWriter(folder, 0)
    steps.write([row(step) for step in range(20)])
    steps.close()
    shown = list[RemainingTime]()
    monkeypatch.setattr(live, "format_remaining", shown.append)
    live_run.catch_up()
    assert shown[-1].low_s <= 61 <= shown[-1].high_s
    assert shown[-1].low_s > 30


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (24, "shorter than twice its warm-up of 50 steps, so the learning rate reaches only 0.024; train longer, or"),
        (100, ""),
        (None, ""),
    ],
)
def test_a_run_that_is_too_short_for_its_warm_up_says_so(folder: RunFolder, steps: int | None, text: str) -> None:
    screen, out = console()
    described = topology(recipe=recipe(warmup_steps=50))
    with LiveRun(folder.path, screen):
        events = EventWriter(folder)
        events.write(ConfigEvent(**asdict(described)))
        events.write(StartEvent(steps=steps, steps_per_epoch=12, dropped=0))
        events.close()
    assert ("twice its warm-up" in out.getvalue()) == bool(text)
    assert text in " ".join(out.getvalue().split())
