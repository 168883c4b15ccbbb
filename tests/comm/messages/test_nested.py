"""Messages of nested values: they arrive as they were sent; what cannot be sent is named."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.comm import Comm
from paceline.comm.messages.nested import NestedMessage, receive_broadcast, receive_nested
from paceline.errors import WorkloadError
from ranks import Pool


class Pair(NamedTuple):
    """Batch of a kind that users define."""

    x: Tensor
    y: Any


def value_of(rank: int) -> Any:
    return [
        Pair(torch.full((2, 3), rank, dtype=torch.bfloat16), {"length": rank, 3: (1.5, None, True)}),
        {"empty": torch.empty(0, 4), "mask": torch.tensor([True, False]), "name": "ä"},
        (np.arange(rank + 2), np.float32(0.1), float("inf"), torch.randn(3, 4).t().isnan()),
    ]


def exchange(comm: Comm) -> bool:
    message = NestedMessage(value_of(comm.rank), "a batch", "send something else")
    if comm.rank:
        message.send(0, comm.control.group)
        return True
    return all(equal(receive_nested(rank, comm.control.group, value_of(0)), value_of(rank)) for rank in (1, 2))


def equal(found: Any, expected: Any) -> bool:
    """Return whether two nested values have the same types and contents."""
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, np.ndarray | np.generic):
        return found.dtype == expected.dtype and np.array_equal(found, expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(equal(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return all(equal(one, other) for one, other in zip(found, expected, strict=True))
    return bool(found == expected)


def test_nested_values_arrive_as_they_were_sent(pool: Pool) -> None:
    assert pool.run(exchange, 3) == [True] * 3


def broadcast(comm: Comm) -> bool:
    value = value_of(3)[1:]  # Without a named tuple, whose type receivers do not know.
    if comm.rank == 0:
        NestedMessage(value, "a batch", "send something else").broadcast(comm.control.group)
        return True
    return equal(receive_broadcast(comm.control.group), value)


def test_a_nested_value_reaches_all_ranks(pool: Pool) -> None:
    assert pool.run(broadcast, 3) == [True] * 3


@pytest.mark.parametrize("value", [object(), torch.eye(2).to_sparse(), {"when": np.datetime64("2020-01-01")}])
def test_a_value_that_cannot_be_sent_is_named(value: Any) -> None:
    with pytest.raises(WorkloadError, match=r"a batch contains a (object|Tensor|datetime64), which ranks cannot send"):
        NestedMessage((1, value), "a batch", "send something else")
