"""`Overlapped`: gradients of earlier micro-batches, and gradients that are read or changed before `step`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import Comm
from paceline.errors import WorkloadError
from paceline.strategies.base.overlapped import Overlapped
from paceline.strategies.registry import create
from paceline.training.sync import Sync
from ranks import Pool
from registered import LOSSLESS, with_options

SMALL = {"bucketed": "first_mb=0.0001,bucket_mb=0.0002", "priority": "slice_mb=0.0002"}
OVERLAPPED = [
    *with_options([name for name in LOSSLESS if isinstance(create(name), Overlapped)], SMALL),
    "shared_memory:first_mb=0.0001,bucket_mb=0.0002,thread=true",
]


class TwoPaths(nn.Module):
    """Model with a layer that not every forward pass uses, between two that are always used."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(5, size, dtype=dtype) for size in (5, 5, 1))

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        """Apply all layers, or skip the second one."""
        x = torch.tanh(self.first(x))
        return self.last(x if skip else torch.tanh(self.second(x)))


def attach(comm: Comm, text: str, *, allow_unused: bool = False, dtype: torch.dtype = torch.float64) -> Sync:
    torch.manual_seed(0)
    strategy = create(text, allow_unused=allow_unused)
    return Sync(TwoPaths(dtype), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), strategy, comm, "local")


def batch(rank: int, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank), dtype=dtype)


def weights(sync: Sync) -> Tensor:
    with sync.agreed() as model:
        return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def train_with_skips(comm: Comm, text: str, allow_unused: bool) -> Tensor:
    """Return the weights after steps whose last micro-batch skips a layer that the first one used."""
    sync = attach(comm, text, allow_unused=allow_unused)
    for step in range(4):
        with sync.accumulate():
            sync.model(batch(comm.rank, step)).sum().backward()
        sync.model(batch(comm.rank, step + 50), skip=True).sum().backward()
        sync.step()
    found = weights(sync)
    sync.detach()
    return found


@pytest.mark.parametrize("text", OVERLAPPED)
@pytest.mark.parametrize("allow_unused", [False, True])
def test_gradients_of_earlier_microbatches_are_sent_too(pool: Pool, text: str, allow_unused: bool) -> None:
    expected = pool.run(train_with_skips, 3, "allreduce", allow_unused)[0]
    for found in pool.run(train_with_skips, 3, text, allow_unused):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def second_derivatives(comm: Comm, text: str) -> Tensor:
    sync = attach(comm, text)
    for step in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Torch warns of reference cycles, which `step` breaks.
            sync.model(batch(comm.rank, step)).sum().backward(create_graph=True)
        sync.step()
    found = weights(sync)
    sync.detach()
    return found


@pytest.mark.parametrize("text", OVERLAPPED)
def test_backward_may_record_operations_for_second_derivatives(pool: Pool, text: str) -> None:
    expected = pool.run(second_derivatives, 2, "allreduce")[0]
    for found in pool.run(second_derivatives, 2, text):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def scaled(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def replaced(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = 0.5 * parameter.grad


def cleared(parameter: nn.Parameter) -> None:
    parameter.grad = None


def clipped(parameter: nn.Parameter) -> None:
    nn.utils.clip_grad_norm_([parameter], 1e-6)


def changed(comm: Comm, text: str, change: Callable[[nn.Parameter], None], step: int) -> tuple[str, str | None]:
    """Return message and hint of the error if a gradient is changed between backward and `step`, in one step."""
    sync = attach(comm, text, dtype=torch.float32)
    try:
        for number in range(step + 1):
            sync.model(batch(comm.rank, number, torch.float32)).sum().backward()
            if number == step:
                change(sync.strategy.model.get_parameter("second.weight"))
            sync.step()
    except WorkloadError as error:
        return error.message, error.hint
    finally:
        sync.strategy.abandon()
    return "no error", None


@pytest.mark.parametrize("text", OVERLAPPED)
@pytest.mark.parametrize(("change", "step"), [(scaled, 0), (scaled, 2), (replaced, 2), (cleared, 1), (clipped, 1)])
def test_a_gradient_changed_after_backward_is_refused(pool: Pool, text: str, change: Any, step: int) -> None:
    for message, hint in pool.run(changed, 2, text, change, step):
        assert message == "the gradient of second.weight was changed after backward had sent it."
        assert hint is not None
        assert "sync.step(max_norm=…)" in hint


def by_scaler(comm: Comm, text: str) -> str:
    sync, scaler = attach(comm, text, dtype=torch.float32), torch.amp.GradScaler("cpu")
    try:
        for step in range(2):
            scaler.scale(sync.model(batch(comm.rank, step, torch.float32)).sum()).backward()
            scaler.unscale_(sync.optimizer)
            sync.step()
            scaler.update()
    except WorkloadError as error:
        return error.message
    finally:
        sync.strategy.abandon()
    return "no error"


@pytest.mark.parametrize("text", OVERLAPPED)
def test_a_gradient_changed_by_grad_scaler_is_refused(pool: Pool, text: str) -> None:
    for message in pool.run(by_scaler, 2, text):
        assert message.endswith("was changed after backward had sent it.")


def seen_before_step(
    comm: Comm, text: str, dtype: torch.dtype, hosts: tuple[tuple[int, ...], ...]
) -> list[tuple[Tensor, Tensor]]:
    """Return, for each step, the gradient that the loop reads before `step`, and this rank's own gradient."""
    sync, found = attach(replace(comm, hosts=hosts), text, dtype=dtype), []
    weight = sync.strategy.model.get_parameter("first.weight")
    for step in range(3):
        x = batch(comm.rank, step, dtype)
        (own,) = torch.autograd.grad(sync.model(x).sum(), weight)
        sync.model(x).sum().backward()
        comm.control.barrier()  # After it ranks may have started to sum buckets.
        assert weight.grad is not None
        found.append((weight.grad.clone(), own))
        sync.step()
    sync.detach()
    return found


@pytest.mark.parametrize(
    ("text", "dtype", "hosts"),
    [
        *[(text, torch.float32, ((0, 1),)) for text in OVERLAPPED],
        ("shared_memory", torch.bfloat16, ((0, 1),)),
        ("shared_memory", torch.float32, ((0,), (1,))),
    ],
)
def test_before_step_a_gradient_is_this_ranks_own(pool: Pool, text: str, dtype: torch.dtype, hosts: Any) -> None:
    for steps in pool.run(seen_before_step, 2, text, dtype, hosts):
        for seen, own in steps:
            assert torch.equal(seen, own)
