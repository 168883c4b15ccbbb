"""The strategies on a GPU: two ranks that share one through Gloo, against one process. Run with `pytest -m gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.test_train import losses, train
from paceline.records import RunRecord, read_run

pytestmark = pytest.mark.gpu


def run(out: Path, *options: str) -> RunRecord:
    train("cnn", "--device", "cuda", "--batch", "31", "--steps", "10", "--lr", "0.02", "--out", str(out), *options)
    return read_run(out)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    out = tmp_path_factory.mktemp("alone") / "run"
    return losses(run(out, "--strategy", "single", "--precision", "fp64", "--deterministic"))


@pytest.mark.parametrize("strategy", ["gather_scatter", "p2p", "allreduce", "ddp", "ddp:overlap=false"])
def test_losses_are_those_of_one_process(tmp_path: Path, alone: list[float], strategy: str) -> None:
    options = ("--strategy", strategy, "--ranks", "2", "--backend", "gloo", "--precision", "fp64", "--deterministic")
    record = run(tmp_path / "run", *options)
    assert losses(record) == pytest.approx(alone, rel=1e-9)
    assert record.summary is not None
    assert record.summary["weight_divergence"] == 0


def test_one_rank_speaks_nccl(tmp_path: Path) -> None:
    record = run(tmp_path / "run", "--strategy", "ddp", "--ranks", "1", "--precision", "bf16", "--channels-last")
    assert record.topology["backend"] == "nccl"
    assert all(phase > 0 for phase in record.steps[0]["backward_s"])
