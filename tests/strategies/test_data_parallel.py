"""`data_parallel`: refused without several GPUs; left out of sets there; the losses of one GPU on several."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cli.test_train import losses, train
from paceline.comm import Comm
from paceline.config import CompareConfig, RunConfig
from paceline.errors import UsageError
from paceline.experiments.candidates import make_candidates, role_of
from paceline.experiments.checks import check_strategy
from paceline.launch.launcher_process import Shape
from paceline.records import read_run
from paceline.strategies.data_parallel import DataParallel
from paceline.strategies.registry import create
from paceline.training.sync import Sync
from ranks import Pool


@pytest.mark.parametrize(("gpus", "found"), [(0, "none"), (1, "only 1")])
def test_it_needs_several_gpus(gpus: int, found: str) -> None:
    with pytest.raises(UsageError, match=f"needs at least 2; this run has {found}") as caught:
        DataParallel().check_gpus(gpus)
    assert "use single on one device, or ddp" in (caught.value.hint or "")


def test_several_gpus_are_enough() -> None:
    DataParallel().check_gpus(2)


def test_it_is_refused_on_cpus_before_anything_starts() -> None:
    config = RunConfig(strategy="data_parallel", device="cpu")
    with pytest.raises(UsageError, match="data_parallel splits each batch over the GPUs"):
        check_strategy(config, create("data_parallel"), ranks=2)


def test_a_set_leaves_it_out_on_cpus_and_a_name_is_an_error() -> None:
    base, shape = RunConfig(device="cpu"), Shape(1, 2)
    names = [one.config.strategy for one in make_candidates(base, CompareConfig(strategies="all"), shape)]
    assert "ddp" in names
    assert "data_parallel" not in names
    with pytest.raises(UsageError, match="data_parallel splits each batch over the GPUs"):
        make_candidates(base, CompareConfig(strategies="ddp,data_parallel"), shape)


def test_it_is_a_candidate_although_one_rank_trains() -> None:
    assert role_of(create("data_parallel"), 4) == "candidate"
    assert role_of(create("single"), 4) == "baseline"


def attach_on_cpu(comm: Comm) -> str:
    model = nn.Linear(2, 2)
    try:
        Sync(model, lambda params: torch.optim.SGD(params, lr=0.1), DataParallel(), comm, "local")
    except UsageError as error:
        return error.message
    return "no error"


def test_attach_refuses_cpus(pool: Pool) -> None:
    assert "this run has none" in pool.run(attach_on_cpu, 1)[0]


@pytest.mark.parametrize("first", [0, 1])
def test_it_splits_over_all_gpus_and_gathers_on_its_own(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    wrapped: list[tuple[nn.Module, dict[str, Any]]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(nn, "DataParallel", lambda model, **how: wrapped.append((model, how)))
    monkeypatch.setattr(DataParallel, "comm", SimpleNamespace(device=torch.device("cuda", first)))
    model = nn.Linear(2, 2)
    DataParallel().wrap(model)
    others = [number for number in range(3) if number != first]
    assert wrapped == [(model, {"device_ids": [first, *others], "output_device": first})]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_its_losses_are_those_of_one_gpu(tmp_path: Path) -> None:
    """By `sync.model` and `sync.step`, over several steps of a batch that does not divide."""
    found = []
    for strategy in ("single", "data_parallel"):
        what = ("cnn", "--strategy", strategy, "--ranks", "1", "--batch", "31", "--steps", "10", "--lr", "0.02")
        train(*what, "--device", "cuda", "--precision", "fp64", "--out", str(tmp_path / strategy))
        found.append(losses(read_run(tmp_path / strategy)))
    assert found[1] == pytest.approx(found[0], rel=1e-9)
