"""States for tests of checkpoints, and their comparison down to the last bit."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paceline.records.checkpoint import CheckpointInfo
from paceline.strategies.base.strategy import State


def info(step: int, **others: Any) -> CheckpointInfo:
    return CheckpointInfo(
        step=step,
        epoch=1,
        epoch_samples=64 * step,
        samples=128 * step,
        strategy="ddp",
        ranks=2,
        config={"batch": 64},
        time=1e9,
        versions={"torch": "2"},
        **others,
    )


GROUPS = [{"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "params": ["conv.weight", "bias"]}]


def state(value: float = 1.0) -> State:
    """Return a small state all of whose numbers are derived from a value."""
    weight = torch.full((2, 3, 2, 2), value).to(memory_format=torch.channels_last)
    return State(
        model={"tied.weight": weight, "conv.weight": weight, "bias": torch.full((3,), value), "count": torch.tensor(7)},
        optimizer={
            "conv.weight": {"step": torch.tensor(value), "momentum_buffer": weight + 1},
            "bias": {"n": 3, "history": [torch.full((2,), value), None]},
        },
        per_rank={"0": {"error": torch.full((2,), value)}, "1": {"error": torch.full((2,), -value)}},
    )


def assert_same(found: Any, expected: Any) -> None:
    """Check values and types, of tensors also dtype, layout and every bit; numpy's numbers became Python's."""
    if isinstance(expected, Tensor):
        assert_same_tensor(found, expected)
        return
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float):
        assert (math.isnan(found) and math.isnan(expected)) or (found, math.copysign(1, found)) == (
            expected,
            math.copysign(1, expected),
        )
    else:
        assert found == expected


def assert_same_tensor(found: Any, expected: Tensor) -> None:
    plain = expected.detach().resolve_conj().resolve_neg()
    assert type(found) is Tensor
    assert (found.dtype, found.shape) == (plain.dtype, plain.shape)
    assert bits(found) == bits(plain)
    if expected.numel() and is_permuted(expected):
        assert found.stride() == expected.stride()


def bits(tensor: Tensor) -> bytes:
    """Return the elements' bytes, in order; a copy, since a view of one element may keep a stride other than 1."""
    return bytes(torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8).numpy())


def is_permuted(tensor: Tensor) -> bool:
    """Return whether the elements fill their memory without gaps, in whatever order of dimensions."""
    order = sorted(range(tensor.dim()), key=lambda one: (tensor.stride(one), tensor.size(one)), reverse=True)
    return tensor.permute(order).is_contiguous()


def assert_same_state(found: State, expected: State) -> None:
    assert_same(found.model, expected.model)
    assert_same(found.optimizer, expected.optimizer)
    assert_same(found.per_rank, expected.per_rank)
