"""Tests of the search for tensors in nested values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.comm.nested_tensors import tensors_in


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
