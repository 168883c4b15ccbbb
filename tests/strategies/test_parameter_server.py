"""The package `parameter_server` in user commands: servers on separate ranks, synchronous and asynchronous workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import paceline
from paceline.analysis.traffic.payload import payload_of
from paceline.plans.framing import TO_RECEIVE_BYTES, TO_SEND_BYTES
from paceline.plans.parameter_server import REPLY_BYTES
from paceline.records.events import EpochEvent, LogEvent
from paceline.records.experiment.record import ExperimentRecord, read_experiment
from paceline.records.reader import RunRecord
from tries import eventually

pytestmark = pytest.mark.takes(10)

SYNCHRONOUS, ASYNCHRONOUS = "parameter_server:extra=true", "parameter_server:extra=true,asynchronous=true"
SERVER = 2
STEPS, BATCH, SAMPLES = 100, 30, 1437
"""The digits have 1437 samples: an epoch has 48 steps of at most 30 samples and leaves out none."""


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], ExperimentRecord]:
    """Run a comparison with two workers and one server; worker 1 is slowed down. Return its JSON and its record."""
    out = tmp_path_factory.mktemp("compared") / "out"
    size = ["--ranks", "3", "--batch", str(BATCH), "--steps", str(STEPS), "--repeats", "1", "--max-repeats", "1"]
    names = ["--strategies", f"{SYNCHRONOUS},{ASYNCHRONOUS}", "--slow-rank", "1:8", "--no-doctor", "--no-evaluate"]
    # At a constant learning rate, workers send the settings of their optimiser once.
    done = paceline("compare", "cnn", "--recipe", "classic", *names, *size, "--out", str(out), "--json")
    return json.loads(done.stdout), read_experiment(out)


def run_of(record: ExperimentRecord, name: str) -> RunRecord:
    return next(measured.run for measured in record.runs if measured.candidate.name == name)


def test_the_proof_includes_the_server(compared: tuple[dict[str, Any], ExperimentRecord]) -> None:
    proofs = {proof["candidate"]: proof for proof in compared[0]["proofs"]}
    assert proofs.keys() == {SYNCHRONOUS}, "asynchronous workers have no gradient of a whole step to prove"
    assert proofs[SYNCHRONOUS]["holds"]


def test_bytes_sent_are_those_of_the_plan(compared: tuple[dict[str, Any], ExperimentRecord]) -> None:
    payload = payload_of(run_of(compared[1], SYNCHRONOUS))
    assert payload is not None
    announcement = TO_RECEIVE_BYTES / payload.steps  # The server may be ready for the next step when bytes are read.
    for pair in payload.pairs:
        assert pair.expected_bytes is not None
        assert abs(pair.bytes - pair.expected_bytes) <= (1.001 * announcement if pair.source == SERVER else 0)
    for_requests = pytest.approx(REPLY_BYTES + TO_SEND_BYTES + TO_RECEIVE_BYTES, abs=2.001 * announcement)
    assert payload.matrix[SERVER][0] - payload.matrix[SERVER][1] == for_requests, "worker 0 sends the requests"
    assert payload.matrix[SERVER][0] > 200_000
    assert payload.matrix[0][1] < 100, "workers send each other no gradients"


def test_a_slow_worker_trains_fewer_shares(compared: tuple[dict[str, Any], ExperimentRecord]) -> None:
    run = run_of(compared[1], ASYNCHRONOUS)
    assert run.finished
    assert not run.lockstep
    rows = {rank: len(steps) for rank, steps in run.steps.items()}
    assert sum(rows.values()) == 2 * STEPS, "one row for each share of each step"
    assert rows[1] < 0.8 * rows[0]
    assert run.summary is not None
    assert run.summary.steps == STEPS
    assert [len(run.steps[rank]) for rank in (0, 1)] == [rank.steps for rank in run.summary.ranks]


def test_every_sample_is_trained_once_per_epoch(compared: tuple[dict[str, Any], ExperimentRecord]) -> None:
    run = run_of(compared[1], ASYNCHRONOUS)
    for epoch in (0, 1):
        trained = sum(float(steps["samples"][steps["epoch"] == epoch].sum()) for steps in run.steps.values())
        assert trained == SAMPLES
    logged = sum(event.samples for event in run.events_of(LogEvent))
    assert logged == sum(float(steps["samples"].sum()) for steps in run.steps.values())
    assert [(event.epoch, event.step) for event in run.events_of(EpochEvent)] == [(0, 48), (1, 96), (2, STEPS)]
    warm_up, rest = run.events_of(LogEvent)
    assert warm_up.epoch == 0
    assert rest.epoch == 2
    assert rest.epochs == [step // 48 for step in range(warm_up.step, STEPS)]


def test_staleness_is_recorded_and_shown(compared: tuple[dict[str, Any], ExperimentRecord]) -> None:
    result, record = compared
    summary = run_of(record, ASYNCHRONOUS).summary
    assert summary is not None
    staleness = summary.staleness
    assert staleness is not None
    assert staleness.gradients == 2 * STEPS
    assert staleness.max is not None
    assert staleness.max > 1
    rows = {row["name"]: row for row in result["rows"]}
    assert rows[ASYNCHRONOUS]["staleness"]["value"] == pytest.approx(staleness.mean)
    assert rows[SYNCHRONOUS]["staleness"] is None
    assert "Gradient staleness" in (record.path / "report.html").read_text()


def test_samples_per_second_are_samples_of_a_window_by_its_wall_time(
    compared: tuple[dict[str, Any], ExperimentRecord],
) -> None:
    run = run_of(compared[1], ASYNCHRONOUS)
    assert run.summary is not None
    _, last = run.events_of(LogEvent)
    per_step = sum(event.samples for event in run.events_of(LogEvent)) / STEPS
    assert run.summary.samples_per_s == pytest.approx(per_step * len(last.losses) / last.wall_s)


def test_a_failed_server_is_named(tmp_path: Path) -> None:
    size = ["--ranks", "3", "--steps", "50", "--batch", "8"]
    done = paceline(
        "train",
        "user_workloads:server_fails",
        "--strategy",
        ASYNCHRONOUS,
        *size,
        "--out",
        str(tmp_path / "run"),
        expect=6,
    )
    assert "ValueError: the optimiser is out of order" in done.stderr
    assert "rank 2" in done.stderr


@pytest.mark.timing
def test_asynchronous_workers_train_more_samples_than_synchronous_ones_beside_a_slow_rank(tmp_path: Path) -> None:
    def check(attempt: int) -> None:
        out = tmp_path / f"out{attempt}"
        size = ["--ranks", "3", "--batch", str(BATCH), "--steps", str(STEPS), "--repeats", "1", "--max-repeats", "1"]
        names = ["--strategies", f"{SYNCHRONOUS},{ASYNCHRONOUS}", "--slow-rank", "1:8", "--no-doctor", "--no-evaluate"]
        paceline("compare", "cnn", *names, *size, "--no-proof", "--out", str(out), "--json")
        record = read_experiment(out)
        speeds = {n: run_of(record, n).summary.samples_per_s for n in (SYNCHRONOUS, ASYNCHRONOUS)}
        assert speeds[ASYNCHRONOUS] > 1.2 * speeds[SYNCHRONOUS]

    eventually(check)
