"""A user's workloads that work, or fail in common ways; tests run `paceline train user_workloads:NAME` here."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Workload


def plain() -> Workload:
    """Return a linear model on a few samples."""
    torch.manual_seed(0)
    return Workload(model=nn.Linear(4, 3), train=_samples(), test=_samples(), loss=F.cross_entropy)


def one_infinite_sample() -> Workload:
    """Return a linear model on samples of which one is infinite."""
    x, y = _samples()
    x = x.clone()
    x[7] = torch.inf
    return Workload(model=nn.Linear(4, 3), train=(x, y), loss=F.cross_entropy)


def slow() -> Workload:
    """Return a workload with steps of 20 ms, for tests that interrupt it."""
    return _with_loss(lambda _: time.sleep(0.02))


def prints_its_cores() -> Workload:
    """Return a workload whose steps print the cores that they may use."""
    return _with_loss(lambda _: print("cores", *os.sched_getaffinity(0), flush=True))


def slow_with_workers() -> Workload:
    """Return the same with a DataLoader that has a worker process."""
    return replace(slow(), train=DataLoader(TensorDataset(*_samples()), batch_size=8, num_workers=1))


def fails_on_rank_1() -> Workload:
    """Return a workload that raises on rank 1 after 3 steps."""

    def fail(calls: int) -> None:
        if _on_rank_1() and calls > 3:
            raise RuntimeError("sample 17 is damaged")

    return _with_loss(fail)


def killed_on_rank_1() -> Workload:
    """Return a workload that kills rank 1 after 3 steps, as the kernel does when memory runs out."""

    def kill(calls: int) -> None:
        if _on_rank_1() and calls > 3:
            os.kill(os.getpid(), signal.SIGKILL)

    return _with_loss(kill)


def fails_once() -> Workload:
    """Return a workload in which rank 1 fails once, at step 30, as `PACELINE_TEST_FAULT` says: "killed FILE" or so.

    The file exists after the failure.
    """
    how, _, name = os.environ["PACELINE_TEST_FAULT"].partition(" ")
    once = Path(name)

    def fail(calls: int) -> None:
        time.sleep(0.01)
        if not _on_rank_1() or calls < 30 or (once.exists() and how != "always"):
            return
        once.touch()
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "memory":
            torch.empty(2**60)
        if how == "sleeps":
            time.sleep(600)
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        raise RuntimeError("sample 17 is damaged")

    return _with_loss(fail)


def without_memory() -> Workload:
    """Return a workload that runs out of memory in several ways, at batches of 24, 32 and 48 on a rank."""
    torch.manual_seed(0)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if len(output) == 24:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has none free.")
        if len(output) == 32:
            torch.empty(2**60)
        if len(output) == 48:
            os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(output, target)

    return Workload(model=nn.Linear(4, 3), train=_samples(192), loss=loss)


def hangs_on_rank_1() -> Workload:
    """Return a workload that hangs on rank 1 after 3 steps."""

    def hang(calls: int) -> None:
        if _on_rank_1() and calls > 3:
            time.sleep(600)

    return _with_loss(hang)


def keeps_the_lock() -> Workload:
    """Return a workload in which native code keeps Python's lock on rank 1 after 3 steps."""

    def hang(calls: int) -> None:
        if _on_rank_1() and calls > 3:
            mutex, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
            library.pthread_mutex_lock(mutex)
            library.pthread_mutex_lock(mutex)  # Unlike a sleep, no signal ends this wait.

    return _with_loss(hang)


def busy_on_rank_1() -> Workload:
    """Return a workload in which rank 1 computes for 8 s in one step, without any progress that it reports."""

    def compute(calls: int) -> None:
        began_s = time.monotonic()
        while _on_rank_1() and calls == 4 and time.monotonic() < began_s + 8:
            torch.ones(500, 500) @ torch.ones(500, 500)

    return _with_loss(compute)


def fails_while_rank_0_is_busy() -> Workload:
    """Return a workload that raises on rank 1 while the other ranks are busy and do not wait for it."""

    def fail(calls: int) -> None:
        if calls > 3:
            if _on_rank_1():
                raise RuntimeError("sample 17 is damaged")
            time.sleep(600)

    return _with_loss(fail)


def unused() -> Workload:
    """Return a workload with a layer that gets no gradient."""
    return Workload(model=Auxiliary(), train=_samples(), loss=F.cross_entropy)


class Auxiliary(nn.Module):
    """Model with an unused head."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.aux = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the used head."""
        return self.used(x)  # type: ignore[no-any-return]


def past_the_model() -> Workload:
    """Return a workload whose step does not call `model(…)`, so that nothing could be synchronised."""
    model = nn.Sequential(nn.Linear(4, 3))
    return Workload(model=model, train=_samples(), step=lambda m, batch: F.cross_entropy(m[0](batch[0]), batch[1]))


class Slow:
    """Slow batches in random order."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield 12 batches, 10 ms each, shuffled with torch's random numbers."""
        x, y = _samples(96)
        for indices in torch.randperm(96).split(8):
            time.sleep(0.01)
            yield x[indices], y[indices]


def slow_stream() -> Workload:
    """Return a workload whose data loading takes longer than its training."""
    torch.manual_seed(0)
    return Workload(model=nn.Linear(4, 3), train=Slow(), loss=F.cross_entropy)


def fails_in_the_test() -> Workload:
    """Return a workload that fails in the evaluation after training, on more than the two samples of the check."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if not output.requires_grad and len(output) > 6:
            raise ValueError("no such label in the test")
        return F.cross_entropy(output, target)

    return Workload(model=nn.Linear(4, 3), train=_samples(), test=_samples(), loss=loss)


def attempt() -> Workload:
    """Raise an error with the message from the environment."""
    raise ValueError(os.environ["PACELINE_TEST_MISTAKE"])


def normalised() -> Workload:
    """Return a model with BatchNorm, whose loss depends on the split of the batch unless BatchNorm is synchronised."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return Workload(model=model, train=_samples(90), loss=F.cross_entropy)


class Uneven:
    """Batches without a length; rank 1 has fewer."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield 5 batches on rank 1, 7 on the others."""
        torch.manual_seed(0)
        for _ in range(5 if _on_rank_1() else 7):
            yield torch.randn(9, 4), torch.randint(0, 3, (9,))


def uneven() -> Workload:
    """Return a workload with different numbers of batches on the ranks."""
    return Workload(model=nn.Linear(4, 3), train=Uneven(), loss=F.cross_entropy)


class _OutOfOrder(torch.optim.SGD):
    """Optimiser that fails in a step with gradients."""

    def step(self, closure=None):  # type: ignore[no-untyped-def, override]
        """Raise if any parameter has a gradient."""
        if any(parameter.grad is not None for group in self.param_groups for parameter in group["params"]):
            raise ValueError("the optimiser is out of order")
        return super().step(closure)


def overflowing() -> Workload:
    """Return a workload with gradients of more than 1, which overflow in float16 if scaled by 65,536."""
    return Workload(model=nn.Linear(4, 3), train=_samples(), loss=lambda out, y: 100 * F.cross_entropy(out, y))


def scheduled() -> Workload:
    """Return a workload whose learning rate is set by a scheduler of its own."""

    def scheduler(optimizer: torch.optim.Optimizer, steps: int | None) -> torch.optim.lr_scheduler.LRScheduler:
        assert steps is not None
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - 0.5 * step / steps)

    return Workload(
        model=nn.Linear(4, 3),
        train=_samples(),
        loss=F.cross_entropy,
        optimizer=lambda params: torch.optim.SGD([p for _, p in params], lr=0.1, momentum=0.9),
        scheduler=scheduler,
    )


class _KeepsASet(torch.optim.SGD):
    """Optimiser with a state that no checkpoint can keep."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["seen"] = {1, 2}
        return super().step(closure)


def keeps_a_set() -> Workload:
    """Return a workload whose optimiser has such a state."""
    return Workload(
        model=nn.Linear(4, 3),
        train=_samples(),
        loss=F.cross_entropy,
        optimizer=lambda params: _KeepsASet([p for _, p in params], lr=0.1),
    )


def server_fails() -> Workload:
    """Return a workload whose optimiser fails on the rank that makes the step."""
    model = nn.Linear(4, 3)
    return Workload(
        model=model, train=_samples(), loss=F.cross_entropy, optimizer=lambda named: _OutOfOrder(named, lr=0.1)
    )


def wider_on_rank_1() -> Workload:
    """Return a model with another width on rank 1."""
    width = 6 if _on_rank_1() else 5
    return replace(plain(), model=nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3)))


def integer_buffer_on_rank_1() -> Workload:
    """Return a model with a buffer of another dtype on rank 1."""
    made = plain()
    made.model.register_buffer("mask", torch.ones(3, dtype=torch.int32 if _on_rank_1() else torch.bool))
    return made


def reordered_on_rank_1() -> Workload:
    """Return a model whose layers were made in another order on rank 1."""
    layers = OrderedDict((name, nn.Linear(4, 4)) for name in ("ba" if _on_rank_1() else "ab"))
    return replace(plain(), model=nn.Sequential(nn.Sequential(layers), nn.Linear(4, 3)))


def other_weights_on_rank_1() -> Workload:
    """Return the model of `plain` with other weights on rank 1."""
    made = plain()
    if _on_rank_1():
        nn.init.normal_(made.model.weight)
    return made


def _samples(count: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def _on_rank_1() -> bool:
    return os.environ.get("RANK") == "1"


def _with_loss(before) -> Workload:  # type: ignore[no-untyped-def]
    calls = [0]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if output.requires_grad:  # Not in evaluation mode, in which the check before training runs too.
            calls[0] += 1
            before(calls[0])
        return F.cross_entropy(output, target)

    return Workload(model=nn.Linear(4, 3), train=_samples(), loss=loss)
