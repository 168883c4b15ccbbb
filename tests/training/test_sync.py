"""Tests of `Sync` with every strategy on a GPU: two ranks share it through Gloo. Run with `pytest -m gpu`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cli.test_train import losses, train
from paceline.analysis.steps.split import PARTS, split_of, split_steps
from paceline.records import RunRecord, read_run
from paceline.records.events import CudaGraphEvent
from paceline.records.timeline import Purpose
from paceline.training.checkpoints.storage.load import load
from registered import EXCHANGING, LOSSLESS

pytestmark = pytest.mark.gpu


def run(out: Path, *options: str) -> RunRecord:
    train("cnn", "--device", "cuda", "--batch", "31", "--steps", "10", "--lr", "0.02", "--out", str(out), *options)
    return read_run(out)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    out = tmp_path_factory.mktemp("alone") / "run"
    return losses(run(out, "--strategy", "single", "--precision", "fp64", "--deterministic"))


@pytest.mark.parametrize("strategy", [*LOSSLESS, "ddp:overlap=false"])
def test_losses_are_those_of_one_process(tmp_path: Path, alone: list[float], strategy: str) -> None:
    options = ("--strategy", strategy, "--ranks", "2", "--backend", "gloo", "--precision", "fp64", "--deterministic")
    record = run(tmp_path / "run", *options)
    assert losses(record) == pytest.approx(alone, rel=1e-9)
    assert record.summary is not None
    assert record.summary.weight_divergence == 0


@pytest.mark.parametrize("strategy", ["tree", "halving_doubling"])
def test_three_ranks_share_a_gpu(tmp_path: Path, alone: list[float], strategy: str) -> None:
    """A number of ranks that is no power of two, and that does not divide the batch."""
    options = ("--strategy", strategy, "--ranks", "3", "--backend", "gloo", "--precision", "fp64", "--deterministic")
    assert losses(run(tmp_path / "run", *options)) == pytest.approx(alone, rel=1e-9)


def test_ranks_that_share_a_gpu_choose_gloo_by_themselves(tmp_path: Path, alone: list[float]) -> None:
    ranks = str(torch.cuda.device_count() + 1)
    record = run(tmp_path / "run", "--strategy", "ddp", "--ranks", ranks, "--precision", "fp64", "--deterministic")
    assert record.topology.backend == "gloo"
    assert losses(record) == pytest.approx(alone, rel=1e-9)


def with_batchnorm(out: Path, *options: str, device: str = "cuda", steps: int = 10) -> RunRecord:
    what = ("gpu_workloads:with_batchnorm", "--batch", "16", "--steps", str(steps), "--lr", "0.05", "--ranks", "2")
    train(*what, "--backend", "gloo", "--device", device, "--out", str(out), *options)
    return read_run(out)


@pytest.fixture(scope="module", params=["broadcast", "sync"])
def on_cpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RunRecord]:
    """Return a mode of BatchNorm, and a run of two ranks with it on CPUs."""
    out = tmp_path_factory.mktemp("on-cpus") / "run"
    options = ("--strategy", "allreduce", "--precision", "fp64", "--bn", request.param)
    return request.param, with_batchnorm(out, *options, device="cpu")


@pytest.mark.parametrize("strategy", EXCHANGING)
def test_batchnorm_of_ranks_that_share_a_gpu(tmp_path: Path, on_cpus: tuple[str, RunRecord], strategy: str) -> None:
    bn, expected = on_cpus
    found = with_batchnorm(tmp_path / "run", "--strategy", strategy, "--precision", "fp64", "--bn", bn)
    assert losses(found) == pytest.approx(losses(expected), rel=1e-6)
    assert found.summary is not None
    assert expected.summary is not None
    assert found.summary.weight_divergence == 0
    assert found.summary.test is not None
    assert expected.summary.test is not None
    assert found.summary.test.loss == pytest.approx(expected.summary.test.loss, rel=1e-6), "running statistics"


def test_an_asynchronous_server_trains_on_a_gpu(tmp_path: Path) -> None:
    record = with_batchnorm(tmp_path / "run", "--strategy", "parameter_server:asynchronous=true", steps=80)
    found = losses(record)
    assert len(found) == 80
    assert all(math.isfinite(loss) for loss in found)
    assert sum(found[-7:]) < 0.7 * sum(found[:7])


def moved(out: Path, *options: str, lr: str = "0.02") -> tuple[Tensor, RunRecord]:
    """Train 10 steps; return the weights at the end, in one tensor."""
    what = ("cnn", "--device", "cuda", "--batch", "31", "--steps", "10", "--lr", lr, "--backend", "gloo")
    weights = out / "weights.safetensors"
    train(*what, "--out", str(out / "run"), "--save", str(weights), *options)
    tensors = sorted(load_file(weights).items())
    return torch.cat([tensor.double().flatten() for _, tensor in tensors]), read_run(out / "run")


@pytest.fixture(scope="module")
def movement(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensor, Tensor]:
    """Return the weights before and after training by one process in float32."""
    folder, options = tmp_path_factory.mktemp("movement"), ("--strategy", "single", "--ranks", "1")
    before, after = (moved(folder / lr, *options, "--precision", "fp32", lr=lr)[0] for lr in ("1e-9", "0.02"))
    return before, after


@pytest.mark.parametrize("strategy", ["single", *LOSSLESS])
def test_float16_moves_the_weights_as_float32_does(
    tmp_path: Path, movement: tuple[Tensor, Tensor], strategy: str
) -> None:
    """Gradients of another scale, such as those of a sum in place of a mean, move them by another distance.

    Losses would not show it: in 10 steps, twice the gradient changes them by 0.2%.
    """
    ranks = "1" if strategy == "single" else "2"
    after, record = moved(tmp_path, "--strategy", strategy, "--ranks", ranks, "--precision", "fp16")
    before, expected = movement
    assert float((after - expected).norm() / (expected - before).norm()) < 0.3
    assert record.summary is not None
    assert record.summary.skipped_steps <= 2
    if strategy != "single":
        assert record.summary.weight_divergence == 0


@pytest.mark.parametrize(("ranks", "backend"), [("1", "nccl"), ("2", "gloo")])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_run_that_resumes_has_the_losses_of_one_that_never_stopped(
    tmp_path: Path, ranks: str, backend: str, precision: str
) -> None:
    """Bit for bit: weights, momentum, random numbers of the GPU and the scale of the loss go on."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    options = ("--ranks", ranks, "--backend", backend, "--precision", precision, "--deterministic")
    before = run(whole, *options, "--checkpoint-every", "4", "--keep", "9")
    train("--resume", str(whole / "checkpoints" / "step-00000004"), "--out", str(resumed))
    after = read_run(resumed)
    assert losses(after) == losses(before)[4:]
    first, second = (load(folder / "checkpoints" / "step-00000010") for folder in (whole, resumed))
    assert second.info.loop["scaler"] == first.info.loop["scaler"]
    assert (first.info.loop["scaler"] is not None) == (precision == "fp16")
    for name, weight in first.state.model.items():
        assert torch.equal(second.state.model[name], weight), name
    assert first.info.random[0].cuda == second.info.random[0].cuda is not None


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("single", "1"), ("none", "2"), ("allreduce", "2"), ("ring", "2"), ("p2p", "2")]
)
@pytest.mark.parametrize("options", [(), ("--accumulate", "2"), ("--clip-norm", "0.5"), ("--optimizer", "muon")])
def test_cuda_graphs_train_as_steps_without_them(
    tmp_path: Path, strategy: str, ranks: str, options: tuple[str, ...]
) -> None:
    common = ("--strategy", strategy, "--ranks", ranks, "--backend", "gloo", "--precision", "fp32", "--steps", "20")
    without, with_graphs = (
        run(tmp_path / mode, *common, "--schedule", "cosine", "--cuda-graph", mode, *options) for mode in ("off", "on")
    )
    # Kernels may sum in another order, and Muon's orthogonal updates amplify rounding from step to step: after 15 steps
    # it was 0.15% on an H200.
    first = 10 if "muon" in options else 20
    assert losses(with_graphs)[:first] == pytest.approx(losses(without)[:first], rel=1e-3)
    assert losses(with_graphs)[first:] == pytest.approx(losses(without)[first:], rel=5e-3)
    assert [event.used for event in with_graphs.events_of(CudaGraphEvent)] == [True]


def test_one_rank_speaks_nccl(tmp_path: Path) -> None:
    record = run(tmp_path / "run", "--strategy", "ddp", "--ranks", "1", "--precision", "bf16", "--channels-last")
    assert record.topology.backend == "nccl"
    assert all(phase > 0 for phase in record.steps[0]["backward_s"])


# Time splits, from the events of the GPU's streams.

BUCKETED = "ddp:bucket_mb=1"
STEPS = 16


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, str], RunRecord]:
    """Return runs of a model with enough to compute and to send, cached by strategy, ranks and backend."""

    @cache
    def make(strategy: str, ranks: int, backend: str) -> RunRecord:
        out = tmp_path_factory.mktemp("timed") / "run"
        options = ("--strategy", strategy, "--ranks", str(ranks), "--backend", backend, "--steps", str(STEPS))
        train("vgg11", "--data", "synthetic", "--device", "cuda", "--batch", "64", "--out", str(out), *options)
        record = read_run(out)
        assert record.topology.backend == backend
        assert sorted(record.timelines) == list(range(ranks))
        return record

    return make


@pytest.mark.parametrize(
    ("strategy", "ranks", "backend"),
    [("allreduce", 2, "gloo"), (BUCKETED, 2, "gloo"), ("allreduce", 1, "nccl"), (BUCKETED, 1, "nccl")],
)
def test_the_parts_of_a_step_add_up(
    timed: Callable[[str, int, str], RunRecord], strategy: str, ranks: int, backend: str
) -> None:
    record = timed(strategy, ranks, backend)
    for rank, timeline in record.timelines.items():
        found = split_steps(timeline)
        assert [step.step for step in found] == list(range(STEPS))
        for step in found:
            parts_s = sum(getattr(step.split, f"{part}_s") for part in PARTS)
            assert parts_s == pytest.approx(record.steps[rank].total_s[step.step], rel=0.01)
            assert step.split.descheduled_s is None, "the host's processor time says nothing about the GPU's"
        mean = split_of(timeline)
        assert mean is not None
        assert mean.computing_s > median(record.steps[rank]["forward_s"]), "it has backward and the update, too"


def test_what_comes_after_backward_overlaps_nothing(timed: Callable[[str, int, str], RunRecord]) -> None:
    for timeline in timed("allreduce", 2, "gloo").timelines.values():
        split = split_of(timeline)
        assert split is not None
        assert split.exposed_s > 0
        assert split.overlap is not None
        assert split.overlap < 0.05


def test_buckets_overlap_with_backward(timed: Callable[[str, int, str], RunRecord]) -> None:
    for timeline in timed(BUCKETED, 2, "gloo").timelines.values():
        operations = timeline.operations
        gradients = operations[(operations["purpose"] == Purpose.GRADIENTS) & (operations["step"] == STEPS - 1)]
        assert len(gradients) > 3, "several buckets"
        split = split_of(timeline)
        assert split is not None
        assert split.overlap is not None
        assert split.overlap > 0


def test_buckets_are_seen_under_nccl(timed: Callable[[str, int, str], RunRecord]) -> None:
    (timeline,) = timed(BUCKETED, 1, "nccl").timelines.values()
    steps = timeline.operations["step"]
    assert all((steps == step).sum() > 3 for step in range(5, STEPS))
