"""`data_parallel`: refused without several GPUs; left out of sets there; the gradient of the whole batch on several."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.comm import Comm
from paceline.config import CompareConfig, RunConfig
from paceline.errors import UsageError
from paceline.experiments.candidates import make_candidates, role_of
from paceline.experiments.checks import check_strategy
from paceline.launch.launcher_process import Shape
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


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_gradient_is_that_of_the_whole_batch() -> None:
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).double().to(device)
    x, y = torch.randn(10, 8, dtype=torch.float64, device=device), torch.arange(10, device=device) % 3
    F.cross_entropy(model(x), y).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    F.cross_entropy(nn.DataParallel(model)(x), y).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
