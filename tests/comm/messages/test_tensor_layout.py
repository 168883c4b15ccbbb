"""Tests of layouts: models that differ between ranks are refused by their first difference, before bytes are sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import Comm
from paceline.comm.group import broadcast_from_rank_0
from paceline.comm.messages.tensor_layout import TensorLayout, first_difference
from paceline.errors import WorkloadError
from paceline.strategies.registry import create
from paceline.training.sync import Sync
from ranks import Pool


def with_buffer(dtype: torch.dtype) -> nn.Module:
    model = nn.Linear(3, 4)
    model.register_buffer("mask", torch.ones(2, dtype=dtype))
    return model


def frozen(model: nn.Module) -> nn.Module:
    model.bias.requires_grad_(False)
    return model


MODELS: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "shape": (lambda rank: nn.Linear(3, 4 + rank), "weight has shape (4, 3) on rank 0 and (5, 3) on rank 1"),
    "missing": (lambda rank: nn.Linear(3, 4, bias=not rank), "bias exists on rank 0, but not on rank 1"),
    "more": (lambda rank: nn.Linear(3, 4, bias=bool(rank)), "bias exists on rank 1, but not on rank 0"),
    "dtype": (
        lambda rank: nn.Linear(3, 4).to(torch.float64 if rank else torch.float32),
        "weight is float32 on rank 0 and float64 on rank 1",
    ),
    "order": (
        lambda rank: nn.ModuleDict({name: nn.Linear(2, 2) for name in ("ba" if rank else "ab")}),
        "a.weight on rank 0 is at the place of b.weight on rank 1",
    ),
    "buffer": (
        lambda rank: with_buffer(torch.int32 if rank else torch.bool),
        "mask is bool on rank 0 and int32 on rank 1",
    ),
    "frozen": (
        lambda rank: frozen(nn.Linear(3, 4)) if rank else nn.Linear(3, 4),
        "bias has requires_grad=True on rank 0 and False on rank 1",
    ),
}


def attach(comm: Comm, case: str) -> tuple[str, str]:
    model = MODELS[case][0](comm.rank)
    try:
        Sync(model, lambda named: torch.optim.SGD(named, lr=0.1), create("allreduce"), comm, "broadcast").detach()
    except WorkloadError as error:
        return error.message, error.hint or ""
    return "no error", ""


@pytest.mark.parametrize("case", MODELS)
def test_different_models_are_refused_on_all_ranks(pool: Pool, case: str) -> None:
    for message, hint in pool.run(attach, 2, case):
        assert message == f"the ranks have different models: {MODELS[case][1]}."
        assert "create the same model on every rank" in hint


def attach_lazy(comm: Comm) -> str:
    try:
        Sync(nn.LazyLinear(3), lambda named: torch.optim.SGD(named, lr=0.1), create("allreduce"), comm, "broadcast")
    except WorkloadError as error:
        return error.message
    return "no error"


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_layer_is_named(pool: Pool) -> None:
    for message in pool.run(attach_lazy, 2):
        assert message == "weight has no shape yet: its layer is lazy, and no input has passed through it."


def test_equal_layouts_have_no_difference() -> None:
    layout = [TensorLayout("a", "float32", (2, 3))]
    assert first_difference({0: layout, 1: list(layout)}) == ""


def odd_tensors(seed: int) -> list[Tensor]:
    """Return tensors of any dtype and memory layout, with odd sizes in between."""
    torch.manual_seed(seed)
    return [
        torch.randint(0, 2, (3,)).bool(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(5, dtype=torch.complex128),
        torch.empty(0, 3),
        torch.tensor(float(seed), dtype=torch.bfloat16),
        torch.randn(4, 6)[:, ::2],
        torch.randint(0, 99, (7,), dtype=torch.int8),
        torch.randn(3, 2, dtype=torch.float64).t(),
    ]


def broadcast_odd_tensors(comm: Comm) -> bool:
    tensors = odd_tensors(comm.rank)
    broadcast_from_rank_0(tensors, comm)
    return all(torch.equal(found, right) for found, right in zip(tensors, odd_tensors(0), strict=True))


def test_tensors_of_any_layout_are_broadcast_in_one_message(pool: Pool) -> None:
    assert pool.run(broadcast_odd_tensors, 3) == [True] * 3
