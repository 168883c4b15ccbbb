"""State goes into an optimiser as it was: dtypes, values that are not tensors, shared tensors; in the right layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.strategies.base.optimizer_state import clone_tensors, load_optimizer_state
from paceline.training.optimizers.lamb import Lamb


def loaded(saved: dict[str, dict[str, Any]], module: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """Load a state; return it by parameter, in the order of the module."""
    optimizer = torch.optim.Adam(module.parameters(), **options)
    for parameter in module.parameters():
        optimizer.state[parameter] = {"exp_avg": torch.ones(1)}
    load_optimizer_state(optimizer, module.named_parameters(), saved)
    return [optimizer.state.get(parameter, {}) for parameter in module.parameters()]


def test_dtypes_and_other_values_stay() -> None:
    saved = {
        "weight": {
            "double": torch.ones(3, 2, dtype=torch.float64),
            "count": torch.tensor(2**24 + 1),
            "small": torch.ones(3, 2, dtype=torch.int8),
            "history": [torch.zeros(2), None, (1.5, {"a": torch.ones(1)})],
            "text": "x",
        }
    }
    weight, bias = loaded(saved, nn.Linear(2, 3))
    assert bias == {}, "what is not saved is as before the first step"
    assert [weight[key].dtype for key in ("double", "count", "small")] == [torch.float64, torch.int64, torch.int8]
    assert weight["count"] == 2**24 + 1
    assert weight["history"][1:] == [None, (1.5, {"a": torch.ones(1)})]
    assert weight["text"] == "x"


def test_the_saved_state_is_copied() -> None:
    saved = {"weight": {"exp_avg": torch.ones(3, 2), "history": [torch.ones(2)]}}
    weight, _ = loaded(saved, nn.Linear(2, 3))
    weight["exp_avg"].zero_()
    weight["history"][0].zero_()
    weight["history"].append(None)
    assert torch.equal(saved["weight"]["exp_avg"], torch.ones(3, 2))
    assert len(saved["weight"]["history"]) == saved["weight"]["history"][0][0] == 1


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_tensors_of_the_shape_of_a_parameter_get_its_layout(layout: torch.memory_format) -> None:
    convolution = nn.Conv2d(3, 4, 2).to(memory_format=layout)
    other = torch.randn(4, 3, 2, 2)
    rows = torch.randn(5, 4).T
    saved = {"weight": {"exp_avg": other, "rows": rows, "last": other.to(memory_format=torch.channels_last)}}
    weight, _ = loaded(saved, convolution)
    for key in ("exp_avg", "last"):
        assert weight[key].stride() == convolution.weight.stride()
        assert torch.equal(weight[key], other)
    assert weight["rows"].stride() == rows.stride()


def test_a_tensor_that_parameters_share_stays_shared() -> None:
    step = torch.tensor(3.0)
    weight, bias = loaded({"weight": {"step": step}, "bias": {"step": step}}, nn.Linear(2, 3))
    assert weight["step"] is bias["step"] is not step


@pytest.mark.parametrize(
    ("make", "device"),
    [
        (lambda p: torch.optim.Adam(p), "cpu"),
        (lambda p: torch.optim.Adafactor(p), "cpu"),
        (lambda p: torch.optim.Adam(p, capturable=True), "meta"),
        (lambda p: Lamb(p), "meta"),
    ],
    ids=["adam", "adafactor", "capturable", "lamb"],
)
def test_step_counts_are_where_the_optimiser_keeps_them(make: Any, device: str) -> None:
    """A count in main memory would be a constant of a CUDA graph, and the rest of LAMB's state is on the device."""
    weight = nn.Parameter(torch.empty(3, device="meta"))
    optimizer = make([weight])
    load_optimizer_state(optimizer, [("weight", weight)], {"weight": {"step": torch.tensor(3.0)}})
    assert optimizer.state[weight]["step"].device.type == device


def test_clones_share_memory_as_before() -> None:
    shared = torch.ones(2)
    clone = clone_tensors({"a": shared, "b": [shared.view(2), (shared[:1],)], "c": 3})
    clone["a"].zero_()
    assert clone["b"][0] is clone["a"]
    assert clone["b"][1][0].tolist() == [1], "another view of the memory has its own"
    assert shared.tolist() == [1, 1]
    assert clone["c"] == 3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("options", "device"), [({}, "cpu"), ({"fused": True}, "cuda"), ({"capturable": True}, "cuda")]
)
def test_state_goes_to_the_device_of_its_parameter(options: dict[str, Any], device: str) -> None:
    saved = {"weight": {"step": torch.tensor(3.0), "exp_avg": torch.ones(3, 2), "history": [torch.ones(2)]}}
    weight, _ = loaded(saved, nn.Linear(2, 3).cuda(), **options)
    assert weight["exp_avg"].is_cuda
    assert weight["history"][0].is_cuda
    assert weight["step"].device.type == device
