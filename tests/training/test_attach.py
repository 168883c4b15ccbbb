"""Tests of `paceline.attach`: wrong arguments are refused before ranks connect; models can be attached again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel

import paceline
from commands import torchrun
from paceline.errors import UsageError, WorkloadError
from paceline.strategies.ddp import Ddp

pytestmark = pytest.mark.takes(10)

SCRIPTS = Path(__file__).parents[1] / "user_code" / "scripts"


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that no test leaves a process group behind."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    yield
    assert not dist.is_initialized()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def refused(*arguments: Any, **options: Any) -> tuple[str, str | None]:
    with pytest.raises(UsageError) as found:
        paceline.attach(*arguments, **options)
    return found.value.message, found.value.hint


class OwnSgd(torch.optim.SGD):
    """Optimiser of a user."""


@pytest.mark.parametrize(
    ("kind", "call"), [(torch.optim.SGD, "torch.optim.SGD(params, lr=…)"), (OwnSgd, "OwnSgd(params, lr=…)")]
)
def test_an_optimiser_instead_of_a_function(kind: Callable[..., Any], call: str) -> None:
    model = nn.Linear(2, 2)
    message, hint = refused(model, kind(model.parameters(), lr=0.1))
    assert message == (
        f"attach() got an object of type {kind.__name__} instead of a function that creates the optimiser."
    )
    assert hint == f"pass `lambda params: {call}`, and use sync.optimizer afterwards"


def on_meta_and_cpu() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("resnet18", sgd), {}, "attach() got an object of type str as the model."),
        ((nn.Linear, sgd), {}, "attach() got the class Linear as the model."),
        (
            (nn.Linear(2, 2), None),
            {},
            "attach() got None instead of a function that creates the optimiser.",
        ),
        ((nn.Linear(2, 2), sgd, Ddp()), {}, "attach() got an object of type Ddp as the strategy."),
        ((nn.Linear(2, 2), sgd, "dpp"), {}, "there is no strategy 'dpp'."),
        ((nn.Linear(2, 2), sgd, "ddp"), {"bucket": 1}, "there is no ddp option 'bucket'."),
        ((nn.Linear(2, 2), sgd, "ddp"), {"bucket_mb": "big"}, "ddp:bucket_mb='big' is not valid."),
        ((nn.Linear(2, 2), sgd, "ddp"), {"bucket_mb": -1}, "ddp:bucket_mb is -1.0."),
        ((nn.Linear(2, 2), sgd, "allreduce"), {"rank": 2}, "allreduce takes no options, but rank=2 was given."),
        ((nn.Linear(2, 2), sgd), {"bn": "broad"}, "bn cannot be 'broad'."),
        ((nn.Linear(2, 2), sgd), {"bn": None}, "bn cannot be 'None'."),
        ((nn.Linear(2, 2), sgd), {"allow_unused": "no"}, "allow_unused is 'no'."),
        ((nn.Linear(2, 2), sgd), {"replica_guard": "of"}, "replica_guard cannot be 'of'."),
        ((nn.Linear(2, 2), sgd), {"replica_guard": False}, "replica_guard cannot be 'False'."),
        (
            (nn.Linear(2, 2), lambda: None),
            {},
            "attach() calls make_optimizer with one argument, which this function does not accept.",
        ),
        ((nn.Linear(2, 2), sgd), {"timeout": 0}, "timeout is 0."),
        ((nn.Linear(2, 2), sgd), {"timeout": float("inf")}, "timeout is inf."),
        ((nn.Linear(2, 2), sgd), {"timeout": "60"}, "timeout is '60'."),
        ((DataParallel(nn.Linear(2, 2)), sgd), {}, "the model is already parallel: DataParallel synchronises it."),
        (
            (nn.Sequential(DataParallel(nn.Linear(2, 2))), sgd),
            {},
            "0 is already parallel: DataParallel synchronises it.",
        ),
        ((on_meta_and_cpu(), sgd), {}, "1.weight is on the meta device and has no values."),
        ((nn.LazyLinear(2), sgd), {}, "weight has no shape yet."),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    assert refused(*arguments, **options)[0] == message


def test_a_model_that_is_already_wrapped_or_sharded() -> None:
    sync = paceline.attach(nn.Linear(2, 2), sgd, "ddp")
    message, _ = refused(sync.model, sgd, "allreduce")
    assert message == "the model is already parallel: DistributedDataParallel synchronises it."
    from torch.distributed.fsdp import fully_shard

    sharded = fully_shard(nn.Linear(2, 2), mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    assert refused(sharded, sgd)[0] == "the model is already parallel: FSDPModule synchronises it."
    sync.close()


def test_a_model_is_attached_once() -> None:
    model, head = nn.Linear(2, 2), nn.Linear(2, 2)
    sync = paceline.attach(model, sgd)
    assert refused(model, sgd) == (
        "weight is already attached: two strategies would synchronise it.",
        "call close() of the first attach() before the second",
    )
    assert refused(nn.Sequential(model, head), sgd)[0].startswith("0.weight is already attached")
    other = paceline.attach(head, sgd)
    sync.close()
    assert dist.is_initialized(), "the other model still needs the process group"
    with pytest.raises(ZeroDivisionError), paceline.attach(model, sgd, "allreduce"):
        raise ZeroDivisionError
    paceline.attach(model, sgd, "allreduce").close()
    other.close()
    other.close()
    dist.destroy_process_group()  # After an error, `with` waits for nobody and leaves the world to the process.


def test_nothing_is_left_after_a_refusal() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for make in (lambda _: None, lambda p: torch.optim.LBFGS([w for _, w in p])):
        with pytest.raises(WorkloadError):
            paceline.attach(model, make, "bucketed", bn="sync")
        assert not dist.is_initialized()
    assert not model._forward_pre_hooks


def test_a_class_is_a_function_that_creates_the_optimiser() -> None:
    with paceline.attach(nn.Linear(2, 2), torch.optim.SGD, "allreduce") as sync:
        sync.model(torch.ones(1, 2)).sum().backward()
        sync.step()
    assert sync.ranks == 1


def test_attach_again_and_several_at_once_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = json.loads(torchrun("attach_again.py", "ddp", "bucketed", cwd=SCRIPTS).stdout.splitlines()[-1])
    first, second = found["rounds"]
    assert len(set(first)) == 3, "each round trains"
    assert first == pytest.approx(second)
    assert found["own rounds"] == [pytest.approx(first), pytest.approx(second)]
    assert all(distance < 1e-6 for distances in found["two"] for distance in distances)
    assert found["left"]
    assert found["left at the end"]
    assert found["kept"]
    assert found["total"] == 2
