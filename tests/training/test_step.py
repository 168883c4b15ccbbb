"""Steps on a GPU: none waits for the device, and CUDA graphs train as steps without them. Run with `pytest -m gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cli.test_train import losses, train
from paceline.records import RunRecord, read_run
from paceline.records.events import CudaGraphEvent, EvaluationEvent, LogEvent
from paceline.training.checkpoints.storage.load import load

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BATCH = "16"
"""It leaves 4 of the 100 samples for the last of the 7 steps of an epoch."""
STRICT_STEPS = 25
"""The first 5 prepare; 20 must not wait."""
OPTIMIZERS = {
    "sgd": ("--lr", "0.05", "--momentum", "0.9"),
    "adamw": ("--lr", "0.002"),
    "lamb": ("--lr", "0.01"),
    "lars": ("--lr", "0.5", "--momentum", "0.9"),
    "muon": ("--lr", "0.005", "--momentum", "0.9"),
}


def run(out: Path, workload: str, *options: str, expect: int = 0) -> str:
    """Train on one rank; return what the command printed to stderr."""
    what = (f"gpu_workloads:{workload}", "--device", DEVICE, "--batch", BATCH, "--strategy", "single", "--ranks", "1")
    return train(*what, "--out", str(out), *options, expect=expect).stderr


# Waits inside of windows.


@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("workload", ["strict", "strict_with_loader", "strict_with_iterable"])
def test_no_step_waits_for_the_device(tmp_path: Path, workload: str, mode: str) -> None:
    options = ("--steps", str(STRICT_STEPS), "--schedule", "cosine", "--cuda-graph", mode)
    run(tmp_path / "run", workload, *options, *OPTIMIZERS["sgd"])
    assert len(losses(read_run(tmp_path / "run"))) == STRICT_STEPS


@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "lars", "muon"])
def test_no_optimiser_waits_for_the_device(tmp_path: Path, optimizer: str, mode: str) -> None:
    options = ("--steps", str(STRICT_STEPS), "--cuda-graph", mode, "--optimizer", optimizer)
    run(tmp_path / "run", "strict", *options, *OPTIMIZERS[optimizer])


@pytest.mark.parametrize(
    "options",
    [
        ("--precision", "bf16", "--channels-last"),
        ("--accumulate", "2", "--clip-norm", "0.5", "--cuda-graph", "on"),
        ("--accumulate", "2", "--noise-scale", "all"),
        ("--accumulate", "2", "--noise-scale", "auto", "--cuda-graph", "on"),
        ("--strategy", "allreduce", "--cuda-graph", "off"),
        ("--strategy", "ddp"),
    ],
    ids=" ".join,
)
def test_no_setting_waits_for_the_device(tmp_path: Path, options: tuple[str, ...]) -> None:
    run(tmp_path / "run", "strict", "--steps", str(STRICT_STEPS), *OPTIMIZERS["sgd"], *options)


def test_a_wait_inside_of_a_window_is_found(tmp_path: Path) -> None:
    """The tests above can fail."""
    stderr = run(tmp_path / "run", "reads_its_loss", "--steps", str(STRICT_STEPS), "--cuda-graph", "off", expect=6)
    assert "synchronizing CUDA operation" in stderr


# Graphs.


def both(folder: Path, *options: str, rel: float = 1e-3) -> tuple[RunRecord, RunRecord]:
    """Train without and with graphs; check that the losses are the same."""
    for mode in ("off", "on"):
        run(folder / mode, "with_batchnorm", "--cuda-graph", mode, *options)
    without, with_graphs = (read_run(folder / mode) for mode in ("off", "on"))
    assert losses(with_graphs) == pytest.approx(losses(without), rel=rel)
    assert [event.used for event in with_graphs.events_of(CudaGraphEvent)] == [True]
    return without, with_graphs


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimisers_in_graphs(tmp_path: Path, optimizer: str) -> None:
    """The third epoch ends with a batch that is captured in the first."""
    schedule = ("--schedule", "cosine", "--warmup-steps", "3")
    both(tmp_path, "--epochs", "3", "--optimizer", optimizer, *schedule, *OPTIMIZERS[optimizer])


def test_noise_that_is_measured_between_graphs(tmp_path: Path) -> None:
    """Hooks of measured steps leave nothing behind that a capture does not allow, such as nodes of another stream."""
    runs = both(tmp_path, "--epochs", "6", "--accumulate", "2", "--noise-scale", "auto", *OPTIMIZERS["sgd"])
    without, with_graphs = (
        sum(event.noise.steps for event in record.events_of(LogEvent) if event.noise is not None) for record in runs
    )
    assert without >= 1, "a busy machine measures few steps"
    assert with_graphs >= 2, "one before the graphs, and one in the first 16 steps with them"


def test_bf16_in_graphs(tmp_path: Path) -> None:
    both(tmp_path, "--epochs", "3", "--precision", "bf16", "--channels-last", *OPTIMIZERS["sgd"], rel=0.02)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_smaller_last_batches_with_evaluations_and_checkpoints_between(tmp_path: Path, optimizer: str) -> None:
    between = ("--eval-every", "5", "--checkpoint-every", "6", "--keep", "9")
    without, with_graphs = both(tmp_path, "--epochs", "4", "--optimizer", optimizer, *OPTIMIZERS[optimizer], *between)
    tests = [[event.test for event in record.events_of(EvaluationEvent)] for record in (without, with_graphs)]
    assert [test.loss for test in tests[1]] == pytest.approx([test.loss for test in tests[0]], rel=5e-3)
    assert len(tests[0]) >= 5
    for step in (6, 12, 18, 24):
        first, second = (load(tmp_path / mode / "checkpoints" / f"step-{step:08d}") for mode in ("off", "on"))
        for name, value in first.state.model.items():
            torch.testing.assert_close(
                second.state.model[name], value, rtol=1e-2, atol=1e-3, msg=f"{name}, step {step}"
            )
