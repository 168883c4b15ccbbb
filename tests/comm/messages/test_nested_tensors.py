"""Tests of the search for tensors in nested values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.comm.messages.nested_tensors import map_tensors, memory_key, tensors_in


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (torch.tensor(1), [1]),
        ([torch.tensor(1), (torch.tensor(2), {"a": torch.tensor(3)})], [1, 2, 3]),
        ({"b": torch.tensor(1), "a": [torch.tensor(2)]}, [1, 2]),
        (("text", None, 5, {torch.tensor(1)}), []),
    ],
)
def test_tensors_are_found_in_order(values: Any, found: list[int]) -> None:
    assert [int(tensor) for tensor in tensors_in(values)] == found


def test_tensors_are_replaced_and_the_rest_stays() -> None:
    values = {"a": [torch.ones(1), (torch.ones(1), "text")], "b": None}
    found = map_tensors(values, lambda tensor: tensor + 1)
    assert found == {"a": [torch.full((1,), 2.0), (torch.full((1,), 2.0), "text")], "b": None}
    assert values["a"][0] == 1


def test_the_key_of_memory_is_that_of_one_view() -> None:
    tensor = torch.ones(2, 2, dtype=torch.complex64)
    assert memory_key(tensor) == memory_key(tensor.view(2, 2))
    others = [tensor.T, tensor[0], tensor.conj(), tensor.view(4), torch.view_as_real(tensor), tensor.clone()]
    assert len({memory_key(other) for other in [tensor, *others]}) == 7
    assert memory_key(torch.ones(0)) != memory_key(torch.ones(0))
