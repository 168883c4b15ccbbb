"""One-dimensional views share the memory of every dense layout; memory with gaps has none."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from paceline.comm.messages.flat_view import flat_view

BASE = (2, 3, 4, 5)


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


DENSE = {
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "vector": numbered(7),
    "contiguous": numbered(*BASE),
    "channels last": numbered(*BASE).to(memory_format=torch.channels_last),
    "channels last, one channel": numbered(2, 1, 4, 5).to(memory_format=torch.channels_last),
    "channels last, 1×1": numbered(2, 3, 1, 1).to(memory_format=torch.channels_last),
    "channels last 3d": numbered(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    "transposed": numbered(3, 4).t(),
    "part of something larger": numbered(6, 4)[2:5],
    "transposed part": numbered(6, 4)[2:5].t(),
    **{f"permuted {order}": numbered(*BASE).permute(order) for order in itertools.permutations(range(4))},
}


@pytest.mark.parametrize("tensor", DENSE.values(), ids=DENSE.keys())
def test_a_dense_tensor_is_viewed_in_storage_order(tensor: Tensor) -> None:
    flat = flat_view(tensor)
    assert flat is not None
    assert flat.shape == (tensor.numel(),)
    assert flat.is_contiguous()
    assert flat.data_ptr() == tensor.data_ptr()
    assert sorted(flat.tolist()) == sorted(tensor.flatten().tolist())


@pytest.mark.parametrize("name", ["contiguous", "channels last", "transposed", "permuted (3, 1, 0, 2)"])
def test_writing_to_the_view_writes_to_the_tensor(name: str) -> None:
    tensor = DENSE[name].clone(memory_format=torch.preserve_format)
    before = tensor.clone()
    flat = flat_view(tensor)
    assert flat is not None
    flat *= -2
    assert torch.equal(tensor, -2 * before)


def test_the_order_is_that_of_the_memory() -> None:
    flat = flat_view(numbered(3, 4).t())
    assert flat is not None
    assert flat.tolist() == list(range(12))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 1).expand(3, 4),
        torch.ones(1).expand(5),
        numbered(6, 4)[::2],
        numbered(4, 6)[:, :3],
        numbered(4, 6)[:, 1:4].t(),
        numbered(*BASE).to(memory_format=torch.channels_last)[:, :2],
    ],
    ids=["expanded", "expanded scalar", "every other row", "left columns", "transposed columns", "some channels"],
)
def test_memory_with_gaps_has_no_view(tensor: Tensor) -> None:
    assert flat_view(tensor) is None
