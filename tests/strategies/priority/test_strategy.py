"""`priority`: order of slices, deferred updates, errors, and the same weights as with `ddp`."""

from __future__ import annotations

import copy
import io
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from paceline.comm import Comm, open_comm
from paceline.comm.sender import CLOSE_TIMEOUT_S
from paceline.errors import WorkloadError
from paceline.measure.steps import make_stopwatch
from paceline.records.timeline import Purpose
from paceline.strategies.priority.deferred_update import DeferredParameter
from paceline.strategies.priority.strategy import Priority
from paceline.strategies.registry import create
from paceline.training.sync import Sync
from ranks import SIZE, Pool, wait_for_released_groups

pytestmark = pytest.mark.takes(6)

SLICED = "priority:slice_mb=0.0005"
"""Slices of about 500 bytes, so that most layers have several."""


class Plain(nn.Module):
    """Model of layers that are used one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Irregular(nn.Module):
    """Model whose weights are used without a call of their module, before it, twice, or by other modules."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(16))
        self.late = nn.Linear(16, 16)
        self.lent = nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.normed = parametrizations.weight_norm(nn.Linear(16, 16))
        self.memory = nn.LSTM(16, 16, batch_first=True)
        self.first = nn.Linear(6, 16)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.first_weight = nn.Parameter(torch.eye(16))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(self.first(x), self.lent.weight, self.lent.bias) * self.own
        x = x @ self.first_weight
        x = x[:, None].expand(-1, 3, -1)
        x, _ = self.attention(x, x, x)
        x, _ = self.memory(self.normed(x))
        return self.late(self.lent(self.tied(x.mean(1))))


class Changing(nn.Module):
    """Model that uses its weights in another order and way in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0
        self.enter, self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.memory = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        x = self.enter(x)
        match self.passes % 5:
            case 0:  # Adding a bias saves no tensor for backward, so autograd would not notice an outdated value.
                x = x + self.second.bias
            case 1:
                x, (self.first, self.second) = self.second(self.first(x)), (self.second, self.first)
            case 2:
                x = F.linear(x, self.second.weight, self.second.bias)
            case 3:
                x = x + torch.cat([p.sum(0, keepdim=True).reshape(-1)[:16] for p in self.second.parameters()])[:16]
            case 4:
                x = x + torch.stack([self.second.bias, self.first.bias]).sum(0)
        x, _ = self.memory(self.second(self.first(x))[:, None])
        return x[:, 0]


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimiser with two parameter groups, without one of the biases."""
    first, *others = [p for p in parameters if "late.bias" not in p[0]]
    return torch.optim.AdamW([{"params": [first], "lr": 0.02}, {"params": others}], lr=0.01, weight_decay=0.1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)


def batch(rank: int, step: int) -> Tensor:
    torch.manual_seed(100 * step + rank)
    return torch.randn(4, 6, dtype=torch.float64)


def trained(comm: Comm, text: str, make: Callable[[], nn.Module], optimiser: Callable[[Any], Any]) -> Tensor:
    """Return the weights after ten steps, with micro-batches, a scheduler, a clipped step and an inference pass."""
    torch.manual_seed(0)
    model = make().double()
    sync = Sync(model, optimiser, create(text), comm, "broadcast")
    schedule = torch.optim.lr_scheduler.ExponentialLR(sync.optimizer, 0.5)
    for step in range(10):
        if step == 4:
            with sync.accumulate():
                sync.model(batch(comm.rank, 50)).square().mean().backward()
        if step == 7:
            with torch.inference_mode():
                sync.model(batch(comm.rank, 70))
        sync.model(batch(comm.rank, step)).square().mean().backward()
        sync.step(max_norm=0.5 if step == 6 else None)
        schedule.step()
    sync.close()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize(("make", "optimiser"), [(Plain, sgd), (Irregular, adam), (Changing, sgd)])
def test_ten_steps_end_in_the_weights_of_ddp(pool: Pool, make: Any, optimiser: Any) -> None:
    ours, theirs = (pool.run(trained, 2, text, make, optimiser) for text in (SLICED, "ddp"))
    assert torch.equal(ours[0], ours[1])
    # With two ranks, the order of addition cannot differ.
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-13, atol=1e-15)


WIDTHS = (50, 100, 120, 140, 1000)
STEPS = 6


def open_timed(ranks: int) -> Comm | None:
    """Return timed process groups over the first ranks; called on all ranks of the pool, None on the others."""
    cpu = torch.device("cpu")
    stopwatch = make_stopwatch(cpu, events=True)
    return open_comm(range(ranks), device=cpu, backend="gloo", timeout_s=30, stopwatch=stopwatch)


def order_on_the_wire(_: Comm) -> list[list[int]] | None:
    """Return, for each step, the layers of the slices in the order of sending; sending is slower than backward."""
    comm = open_timed(3)
    if comm is None:
        return None
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(before, after, bias=False) for before, after in pairwise(WIDTHS)))
    strategy = create("priority:slice_mb=0.015,window=1")
    sync = Sync(model, sgd, strategy, comm, "local")
    assert isinstance(strategy, Priority)
    stopwatch = comm.stopwatch
    assert stopwatch is not None
    assert stopwatch.operations is not None
    for _ in range(STEPS):
        stopwatch.begin()
        sync.model(torch.randn(2, WIDTHS[0])).mean().backward()
        sync.step()
        stopwatch.end()
    strategy.finish()
    rows = sorted(stopwatch.operations.take_rows(), key=lambda row: row[5])
    layers = {part.flat.nbytes: number for number, parts in enumerate(strategy._block_slices) for part in parts}
    sync.close()
    slices = [row for row in rows if row[2] == Purpose.GRADIENTS]
    return [[layers[row[4]] for row in slices if row[0] == step] for step in range(STEPS)]


def test_the_first_layers_are_sent_first(pool: Pool) -> None:
    found = pool.run(order_on_the_wire, SIZE)
    assert found[1] == found[2] == found[0], "all ranks start the same slices in the same order"
    first, *_, last = found[0]
    assert first == sorted(first, reverse=True), "the first step uses the order of backward"
    assert sorted(last) == sorted(first), "every step sends all slices"
    passed = last.index(0)
    assert last[0] == 3, "the first gradient of backward is sent first"
    assert last[passed:] == sorted(last[passed:]), (
        "after the first layer's gradient, slices are sent in the order of forward"
    )
    assert 3 in last[passed:], "slices of the last layer were overtaken"


class DeliberateError(Exception):
    """Error raised on purpose."""


def failing_forward(comm: Comm) -> tuple[int, int]:
    """Return the number of threads before, and after forward failed while slices were being sent."""
    wait_for_released_groups()
    before = threading.active_count()
    model = Plain()

    def fail(*_: Any) -> None:
        raise DeliberateError

    with suppress(DeliberateError), Sync(model, sgd, create(SLICED), comm, "local") as sync:
        for step in range(3):
            sync.model(batch(comm.rank, step).float()).mean().backward()
            sync.step()
        model.layers[3].register_forward_pre_hook(fail)
        sync.model(batch(comm.rank, 3).float())
    left = sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())
    assert left == 1, "only the hook of this test"
    return before, threading.active_count()


def test_an_error_in_forward_leaves_no_thread(pool: Pool) -> None:
    for before, after in pool.run(failing_forward, 2):
        assert after == before


def lost_peer(comm: Comm) -> str:
    """Return the error on rank 0 when rank 1 leaves between two steps."""
    sync = Sync(Plain(), sgd, create(SLICED), comm, "local")
    try:
        for step in range(5):
            if step == 3 and comm.rank == 1:
                return ""
            sync.model(batch(comm.rank, step).float()).mean().backward()
            sync.step()
    except RuntimeError as error:
        return str(error)
    finally:
        sync.close() if comm.rank == 1 else sync.detach()
    return "no error"


def test_a_peer_that_leaves_is_an_error(pool: Pool) -> None:
    assert "onnection" in pool.run(lost_peer, 2)[0]


def read_between(comm: Comm) -> None:
    """Check that code that reads a weight after a step gets the updated value, wherever forward would wait for it."""
    model = Plain()
    sync = Sync(model, sgd, create(SLICED), comm, "local")
    weight, bias, norm = model.layers[3].weight, model.layers[4].bias, model.layers[1].weight
    for step in range(5):
        sync.model(batch(comm.rank, step).float()).square().mean().backward()
        sync.step()
        if step:
            assert {type(p) for p in model.parameters()} == {DeferredParameter}
        assert (weight.shape, weight.dtype, weight.grad) == ((8, 32), torch.float32, None)
        sync.optimizer.zero_grad()
        if step:
            assert type(weight) is DeferredParameter, "reading its metadata does not wait"
        averaged, copied, raw = copy.deepcopy(model), copy.deepcopy(norm), io.BytesIO()
        torch.save(bias, raw)
        raw.seek(0)
        saved, read = torch.load(raw), weight.tolist()
        with sync.agreed():
            assert read == weight.tolist()
            for ours, theirs in (
                (saved, bias),
                (copied, norm),
                *zip(averaged.parameters(), model.parameters(), strict=True),
            ):
                assert torch.equal(ours, theirs)
                assert type(ours) is type(theirs) is nn.Parameter
    sync.close()


def test_a_weight_read_between_steps_is_updated_first(pool: Pool) -> None:
    pool.run(read_between, 2)


class Bypassing(nn.Module):
    """Model that can read a weight without torch's function dispatch, as foreign code does."""

    bypasses = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 40), nn.Linear(40, 40)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if not self.bypasses:
            return self.second(x)
        with torch._C.DisableTorchFunctionSubclass():
            return x + self.second.bias


def read_bypassing_torch(comm: Comm, accumulates: bool) -> str:
    model = Bypassing()
    strategy = create(SLICED)
    strategy.allow_unused = True
    sync = Sync(model, sgd, strategy, comm, "local")
    message = "no error"
    for step in range(4):
        model.bypasses = step == 3
        try:
            with sync.microbatch(last=not (accumulates and model.bypasses)):
                sync.model(batch(comm.rank, step).float()).mean().backward()
            strategy.finish()
        except WorkloadError as error:
            message = error.message
        else:
            sync.step()
    strategy.abandon()
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    return message


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_weight_used_before_its_update_is_named(pool: Pool, accumulates: bool) -> None:
    for message in pool.run(read_bypassing_torch, 2, accumulates):
        assert message == "second.bias was used before its last update, by code that bypasses torch functions."


def abandoned_in_backward(comm: Comm) -> float:
    """Return the seconds that it takes to leave after a backward pass, a moment later on rank 1; then train again."""
    strategy = create(SLICED)
    sync = Sync(Plain().double(), sgd, strategy, comm, "local")
    for step in range(4):
        sync.model(batch(comm.rank, step)).square().mean().backward()
        if step < 3:
            sync.step()
    time.sleep(0.05 * comm.rank)
    began_s = time.monotonic()
    strategy.abandon()
    taken_s = time.monotonic() - began_s
    again = Sync(Plain().double(), sgd, create(SLICED), comm, "local")
    again.model(batch(comm.rank, 0)).square().mean().backward()
    again.step()
    again.detach()
    return taken_s


def test_ranks_that_leave_after_an_error_do_not_wait_for_all_reduces_that_others_never_start(pool: Pool) -> None:
    assert max(pool.run(abandoned_in_backward, 2)) < CLOSE_TIMEOUT_S / 2


def closed_in_handler(comm: Comm, text: str) -> Tensor:
    """Return the weights after steps that ended with an exception, closed in its handler."""
    torch.manual_seed(0)
    model = Plain().double()
    sync = Sync(model, sgd, create(text), comm, "local")
    try:
        for step in range(4):
            sync.model(batch(comm.rank, step)).square().mean().backward()
            sync.step()
        raise DeliberateError
    except DeliberateError:
        sync.detach()
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_closing_in_an_exception_handler_applies_the_last_updates(pool: Pool) -> None:
    ours, theirs = (pool.run(closed_in_handler, 2, text)[0] for text in (SLICED, "ddp"))
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-15)


def scripted(comm: Comm) -> tuple[Tensor, Tensor]:
    """Train a scripted model, which cannot wait layer by layer; return its weights after a step, and as agreed."""
    with warnings.catch_warnings(action="ignore"):  # torch.jit is deprecated.
        model = torch.jit.trace(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)), torch.zeros(1, 6))
    sync = Sync(model, sgd, create("priority"), comm, "local")
    for step in range(3):
        sync.model(batch(comm.rank, step).float()).square().mean().backward()
        sync.step()
    own = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    with sync.agreed():
        agreed = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    sync.close()
    return own, agreed


def test_a_scripted_model_is_updated_within_step(pool: Pool) -> None:
    for own, agreed in pool.run(scripted, 2):
        assert torch.equal(own, agreed)


class Counting(torch.optim.SGD):
    """Optimiser whose rate depends on a number that it keeps for all parameters together."""

    def __init__(self, parameters: Any, where: str) -> None:
        super().__init__(parameters, lr=0.1)
        self.where = where
        if where == "group":
            for group in self.param_groups:
                group["k"] = 0
        elif where == "tensor":
            for group in self.param_groups:
                group["k"] = torch.zeros(())
        elif where == "attribute":
            self.k = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.where in ("group", "tensor"):
            for group in self.param_groups:
                group["k"] += 1
                group["lr"] = 0.1 / float(group["k"]) if self.where == "group" else 0.1
        else:
            self.k = getattr(self, "k", 0) + 1
        super().step(closure)


def counted(comm: Comm, where: str, max_norm: float | None) -> list[str | None] | str:
    """Return message and hint of the error with an optimiser that counts; with clipping, compare it with `ddp`."""
    found = []
    for text in (SLICED, "ddp"):
        torch.manual_seed(0)
        model = Plain().double()
        sync = Sync(model, lambda p: Counting(p, where), create(text), comm, "local")
        try:
            for step in range(5):
                sync.model(batch(comm.rank, step)).square().mean().backward()
                sync.step(max_norm)
        except WorkloadError as error:
            sync.strategy.abandon()
            return [error.message, error.hint]
        sync.detach()
        found.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-13, atol=1e-15)
    return "as under ddp"


@pytest.mark.parametrize(
    ("where", "name"),
    [("group", 'group["k"]'), ("tensor", 'group["k"]'), ("attribute", "self.k"), ("new attribute", "self.k")],
)
def test_an_optimiser_that_counts_for_all_parameters_is_refused(pool: Pool, where: str, name: str) -> None:
    for message, hint in pool.run(counted, 2, where, None):
        assert message.startswith(f"the optimiser changes {name} in its step")
        assert "bucketed" in hint
    assert pool.run(counted, 2, where, 1.0) == ["as under ddp"] * 2, "clipped steps are not taken in parts"


def optimiser_states(comm: Comm, text: str) -> list[Tensor]:
    """Return momentum and weights as saved after each step, with changes to the optimiser between steps."""
    torch.manual_seed(0)
    model = Plain().double()

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters[1:], lr=0.05, momentum=0.9)

    sync, found = Sync(model, make, create(text), comm, "local"), []
    for step in range(8):
        sync.model(batch(comm.rank, step)).square().mean().backward()
        sync.step()
        if step == 2:
            sync.optimizer.param_groups[0]["lr"] = 0.2
        if step == 4:
            sync.optimizer.add_param_group({"params": [next(model.named_parameters())], "lr": 0.3})
        if step != 3:
            saved = sync.optimizer.state_dict()
            found += [entry["momentum_buffer"].clone() for entry in saved["state"].values()]
            found += [value.clone() for value in model.state_dict().values()]
        if step == 5:
            for entry in saved["state"].values():
                entry["momentum_buffer"] = 0.5 * entry["momentum_buffer"]
            sync.optimizer.load_state_dict(saved)
            model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})
    sync.detach()
    return found


def test_a_saved_state_of_the_optimiser_is_that_of_the_weights(pool: Pool) -> None:
    ours, theirs = (pool.run(optimiser_states, 2, text)[0] for text in (SLICED, "ddp"))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-15)
