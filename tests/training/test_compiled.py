"""Tests of `--compile`: what is compiled, how often, and that nothing else changes."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commands import paceline
from paceline.comm import Comm
from paceline.config import RunConfig
from paceline.errors import UsageError, WorkloadError
from paceline.records import read_run
from paceline.records.events import LogEvent, StartEvent
from paceline.strategies.registry import create
from paceline.training import compiled
from paceline.training.compiled import (
    CompiledForms,
    check_can_compile,
    compile_in_place,
    compile_now,
    explaining_failures,
)
from paceline.training.evaluate import evaluation_mode
from paceline.training.precision import storage_dtype
from paceline.training.sync import Sync
from paceline.workloads.batches import Share, make_source
from ranks import Pool
from registered import LOSSLESS
from training import cases

pytestmark = pytest.mark.takes(25)

RANKS, STEPS, BATCH = 2, 4, 20
"""The fifth batch of an epoch of 96 samples has 16."""


class CountingBackend:
    """Back end that runs the graphs that it is given, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        self.graphs += 1
        return module.forward


def train(comm: Comm, case: str, strategy: str, *, compiles: bool) -> dict[str, Any]:
    """Train an epoch and a half as the loop does, with an evaluation between; return weights and number of graphs."""
    warnings.simplefilter("ignore")  # Of Dynamo, on `.grad` of tensors that are not leaves.
    backend = CountingBackend()
    compiled.BACKEND = backend  # type: ignore[assignment]
    torch.manual_seed(7)
    workload = cases.make(case)
    config = RunConfig(batch=BATCH, precision="fp64", compile=compiles)
    share = Share(comm.rank, comm.world_size, 1, comm.device, storage_dtype("fp64"))
    source = make_source(workload.train, share, batch=BATCH, seed=0)
    model, forms, graphs = workload.model, CompiledForms(), [0]
    names = list(model.state_dict())
    if compiles:
        compile_in_place(model)
    sync = Sync(model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), create(strategy), comm, "broadcast")
    if compiles:
        before = [value.clone() for value in model.state_dict().values()]
        assert compile_now(config, workload, sync, source, forms) is not None
        assert all(map(torch.equal, before, model.state_dict().values()))
        graphs = [backend.graphs]
    for epoch in range(2):
        for micro_batches in source.epoch(epoch):
            (micro_batch,) = micro_batches
            batch = source.fetch(micro_batch)
            with forms.context(batch), sync.microbatch(last=True):
                outcome = workload.forward(sync.model, batch)
            (outcome.loss * micro_batch.weight).backward()
            sync.step()
            forms.end_step()
        with sync.agreed() as agreed, evaluation_mode(agreed, config, comm.device):
            workload.forward(agreed, batch)
        graphs.append(backend.graphs)
    assert list(model.state_dict()) == names
    weights = [value.clone() for value in model.state_dict().values()]
    sync.detach()  # Closing it would close the groups, which the next call uses.
    return {"weights": weights, "graphs": graphs}


def train_both(comm: Comm, strategy: str) -> list[dict[str, Any]]:
    return [train(comm, "small_bn", strategy, compiles=compiles) for compiles in (False, True)]


@pytest.mark.parametrize("strategy", LOSSLESS)
def test_compiled_models_train_as_others_and_are_compiled_once(pool: Pool, strategy: str) -> None:
    for plain, with_compiler in pool.run(train_both, RANKS, strategy):
        for one, other in zip(plain["weights"], with_compiler["weights"], strict=True):
            torch.testing.assert_close(one, other)
        assert with_compiler["graphs"][0] > 0
        assert len(set(with_compiler["graphs"])) == 1, "other batches and evaluation are not compiled"


def test_only_the_forms_of_the_first_step_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CountingBackend()
    monkeypatch.setattr(compiled, "BACKEND", backend)
    model, forms = nn.Linear(3, 2), CompiledForms()
    compile_in_place(model)
    for size in (4, 5):
        with forms.context(torch.ones(size, 3)):
            model(torch.ones(size, 3))
    forms.end_step()
    assert backend.graphs == 2
    for size in (4, 5, 6, 7):
        with forms.context([torch.ones(size, 3)]):
            model(torch.ones(size, 3))
    assert backend.graphs == 2


def test_a_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(UsageError, match=r"no C\+\+ compiler"):
        check_can_compile("cpu")


def test_errors_of_the_compiler_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("no such kernel")

    monkeypatch.setattr(compiled, "BACKEND", fails)
    model = nn.Linear(3, 2)
    compile_in_place(model)
    with pytest.raises(WorkloadError, match=r"the model cannot be compiled: .*no such kernel"), explaining_failures():
        model(torch.ones(4, 3))


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_a_run_with_the_real_compiler(tmp_path: Path) -> None:
    what = ("train", "cnn", "--data", "synthetic:size=100", "--ranks", "2", "--batch", "32", "--epochs", "2")
    losses = []
    for name, option in (("plain", ()), ("compiled", ("--compile",))):
        paceline(*what, *option, "--device", "cpu", "--out", str(tmp_path / name))
        record = read_run(tmp_path / name)
        losses.append([loss for event in record.events_of(LogEvent) for loss in event.losses])
        (start,) = record.events_of(StartEvent)
        assert (start.compile_s is not None) == bool(option)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.gpu
def test_compiled_steps_in_cuda_graphs_have_the_losses_of_others(tmp_path: Path) -> None:
    what = ("train", "cnn", "--data", "synthetic:size=600", "--ranks", "1", "--strategy", "single", "--batch", "32")
    how = ("--device", "cuda", "--precision", "bf16", "--channels-last", "--epochs", "2")
    losses = []
    for name, option in (("plain", ()), ("compiled", ("--compile", "--cuda-graph", "on"))):
        paceline(*what, *how, *option, "--out", str(tmp_path / name))
        record = read_run(tmp_path / name)
        losses.append([loss for event in record.events_of(LogEvent) for loss in event.losses])
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
