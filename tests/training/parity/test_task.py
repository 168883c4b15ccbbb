"""Tests of the proof before a comparison: a workload that does not repeat is reported, not blamed on the strategy."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import paceline
from paceline.records.events import EventT, ParityEvent, UnprovenEvent
from paceline.records.experiment import read_experiment

pytestmark = pytest.mark.takes(8)

QUICK = ("--ranks", "2", "--batch", "16", "--steps", "6", "--repeats", "1", "--max-repeats", "1", "--no-doctor")


def events(out: Path, workload: str, strategies: str, kind: type[EventT]) -> list[EventT]:
    paceline("compare", workload, "--strategies", strategies, *QUICK, "--out", str(out))
    return read_experiment(out).events_of(kind)


def test_strategies_are_proven_on_data_and_weights_that_differ_each_time(tmp_path: Path) -> None:
    proofs = events(tmp_path / "out", "proof_cases:workers", "ddp,allreduce", ParityEvent)
    assert [(proof.candidate, proof.relative_error < 1e-6, proof.steps) for proof in proofs] == [
        ("ddp", True, 3),
        ("allreduce", True, 3),
    ]


def test_on_a_workload_that_does_not_repeat_itself_they_are_measured_unproven(tmp_path: Path) -> None:
    (found,) = events(tmp_path / "out", "proof_cases:unseeded", "ddp,allreduce", UnprovenEvent)
    assert found.candidates == ["ddp", "allreduce"]
    unproven = "ddp, allreduce are measured without a parity proof: one process computes different gradients"
    assert found.reason.startswith(unproven)
    assert found.reason.endswith("seed every random number in the model, the loss and the step.")
    assert not read_experiment(tmp_path / "out").events_of(ParityEvent)
