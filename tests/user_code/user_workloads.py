"""Workloads of a user's own, that work or fail in the ways users' do; the tests run `paceline train own:NAME` here."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Workload


def plain() -> Workload:
    """A linear model on a few samples."""
    torch.manual_seed(0)
    return Workload(model=nn.Linear(4, 3), train=_samples(), test=_samples(), loss=F.cross_entropy)


def slow() -> Workload:
    """Steps of 20 ms, for tests that interrupt it."""
    return _with_loss(lambda _: time.sleep(0.02))


def fails_on_rank_1() -> Workload:
    """An exception on one rank, a few steps in."""

    def fail(calls: int) -> None:
        if _on_rank_1() and calls > 3:
            raise RuntimeError("sample 17 is damaged")

    return _with_loss(fail)


def killed_on_rank_1() -> Workload:
    """What the kernel does to a rank that takes too much memory."""

    def kill(calls: int) -> None:
        if _on_rank_1() and calls > 3:
            os.kill(os.getpid(), signal.SIGKILL)

    return _with_loss(kill)


def hangs_on_rank_1() -> Workload:
    """A rank that never comes back."""

    def hang(calls: int) -> None:
        if _on_rank_1() and calls > 3:
            time.sleep(600)

    return _with_loss(hang)


def fails_while_rank_0_is_busy() -> Workload:
    """An exception on one rank that the other, which does not wait for it, would learn of much later."""

    def fail(calls: int) -> None:
        if calls > 3:
            if _on_rank_1():
                raise RuntimeError("sample 17 is damaged")
            time.sleep(600)

    return _with_loss(fail)


def unused() -> Workload:
    """A layer that gets no gradient."""
    return Workload(model=Auxiliary(), train=_samples(), loss=F.cross_entropy)


class Auxiliary(nn.Module):
    """A model with a head that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.aux = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """One head."""
        return self.used(x)  # type: ignore[no-any-return]


def past_the_model() -> Workload:
    """A step that goes past `model(…)`, so that nothing could be synchronised."""
    model = nn.Sequential(nn.Linear(4, 3))
    return Workload(model=model, train=_samples(), step=lambda m, batch: F.cross_entropy(m[0](batch[0]), batch[1]))


class Slow:
    """Batches that take their time, in an order of their own."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Twelve batches, 10 ms each, shuffled by torch's own random numbers."""
        x, y = _samples(96)
        for indices in torch.randperm(96).split(8):
            time.sleep(0.01)
            yield x[indices], y[indices]


def slow_stream() -> Workload:
    """An iterable whose loading costs more than its training."""
    torch.manual_seed(0)
    return Workload(model=nn.Linear(4, 3), train=Slow(), loss=F.cross_entropy)


def fails_in_the_test() -> Workload:
    """A test that fails after the training."""
    calls = [0]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls[0] += 1
        if not output.requires_grad:
            raise ValueError("no such label in the test")
        return F.cross_entropy(output, target)

    return Workload(model=nn.Linear(4, 3), train=_samples(), test=_samples(), loss=loss)


def attempt() -> Workload:
    """Fails in the way that the environment says."""
    raise ValueError(os.environ["PACELINE_TEST_MISTAKE"])


def normalised() -> Workload:
    """A model with BatchNorm, whose loss depends on how the batch is shared out, unless statistics are synced."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return Workload(model=model, train=_samples(90), loss=F.cross_entropy)


class Uneven:
    """Batches of which nobody knows how many there are: rank 1 has fewer."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Five batches, or seven."""
        torch.manual_seed(0)
        for _ in range(5 if _on_rank_1() else 7):
            yield torch.randn(9, 4), torch.randint(0, 3, (9,))


def uneven() -> Workload:
    """Ranks that do not have the same number of batches."""
    return Workload(model=nn.Linear(4, 3), train=Uneven(), loss=F.cross_entropy)


class _OutOfOrder(torch.optim.SGD):
    """Fails where it has something to step."""

    def step(self, closure=None):  # type: ignore[no-untyped-def, override]
        """Steps nothing."""
        if any(parameter.grad is not None for group in self.param_groups for parameter in group["params"]):
            raise ValueError("the optimiser is out of order")
        return super().step(closure)


def server_fails() -> Workload:
    """An optimiser that fails, wherever it is that steps."""
    model = nn.Linear(4, 3)
    return Workload(
        model=model, train=_samples(), loss=F.cross_entropy, optimizer=lambda named: _OutOfOrder(named, lr=0.1)
    )


def _samples(count: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def _on_rank_1() -> bool:
    return os.environ.get("RANK") == "1"


def _with_loss(before) -> Workload:  # type: ignore[no-untyped-def]
    calls = [0]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls[0] += 1
        before(calls[0])
        return F.cross_entropy(output, target)

    return Workload(model=nn.Linear(4, 3), train=_samples(), loss=loss)
