"""`Overlapped`: gradients of several backward passes, and gradients that are read or changed before `step`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.comm import Comm
from paceline.errors import WorkloadError
from paceline.strategies.base.overlapped import Overlapped
from paceline.strategies.registry import create
from paceline.training.sync import Sync
from ranks import Pool
from registered import LOSSLESS, with_options

pytestmark = pytest.mark.takes(9)

SMALL = {"bucketed": "first_mb=0.0001,bucket_mb=0.0002", "priority": "slice_mb=0.0002"}
OVERLAPPED = [
    *with_options([name for name in LOSSLESS if isinstance(create(name), Overlapped)], SMALL),
    "shared_memory:first_mb=0.0001,bucket_mb=0.0002,thread=true",
]
IN_BACKWARD = [text for text in OVERLAPPED if create(text).agrees_in_backward]
"""Those whose backward returns with the mean gradient, as DDP's does."""
IN_STEP = [text for text in OVERLAPPED if text not in IN_BACKWARD]


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


def scaled(sync: Sync) -> None:
    gradient_of(sync).mul_(0.5)


def replaced(sync: Sync) -> None:
    parameter = sync.strategy.model.get_parameter("second.weight")
    parameter.grad = 0.5 * gradient_of(sync)


def clamped(sync: Sync) -> None:
    for parameter in sync.strategy.model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.clamp_(-0.1, 0.1)


def clipped(sync: Sync) -> None:
    nn.utils.clip_grad_norm_(sync.strategy.model.parameters(), 0.1)


def emptied(sync: Sync) -> None:
    sync.optimizer.zero_grad(set_to_none=False)


def unscaled(sync: Sync) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(sync.optimizer)


def cleared(sync: Sync) -> None:
    sync.strategy.model.get_parameter("second.weight").grad = None


def gradient_of(sync: Sync) -> Tensor:
    gradient = sync.strategy.model.get_parameter("second.weight").grad
    assert gradient is not None
    return gradient


def edited(comm: Comm, text: str, edits: Sequence[Callable[[Sync], None]]) -> list[Tensor]:
    """Return, for each way of changing gradients after backward, the weights after some steps."""
    found = []
    for edit in edits:
        sync = attach(comm, text)
        for step in range(3):
            sync.model(batch(comm.rank, step)).sum().backward()
            edit(sync)
            sync.step()
        found.append(weights(sync))
        sync.detach()
    return found


EDITS = (scaled, replaced, clamped, clipped, emptied, unscaled)


def test_changes_after_backward_take_effect_as_under_ddp(pool: Pool) -> None:
    expected = pool.run(edited, 3, "ddp", EDITS)[0]
    assert len({tuple(weights.tolist()) for weights in expected}) == len(EDITS) - 1, "two ways of halving are equal"
    for text in IN_BACKWARD:
        ranks = pool.run(edited, 3, text, EDITS)
        for found in ranks:
            for one, other, first in zip(found, expected, ranks[0], strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
                assert torch.equal(one, first), "the same on all ranks"


def changed(comm: Comm, text: str, change: Callable[[Sync], None], step: int) -> tuple[str, str | None]:
    """Return message and hint of the error if a gradient is changed between backward and `step`, in one step."""
    sync = attach(comm, text, dtype=torch.float32)
    try:
        for number in range(step + 1):
            sync.model(batch(comm.rank, number, torch.float32)).sum().backward()
            if number == step:
                change(sync)
            sync.step()
    except WorkloadError as error:
        return error.message, error.hint
    finally:
        sync.strategy.abandon()
    return "no error", None


@pytest.mark.parametrize("text", IN_STEP)
@pytest.mark.parametrize(
    ("change", "step"), [(scaled, 0), (scaled, 2), (replaced, 2), (cleared, 1), (clipped, 1), (unscaled, 1)]
)
def test_a_gradient_changed_after_backward_is_refused(pool: Pool, text: str, change: Any, step: int) -> None:
    for message, hint in pool.run(changed, 2, text, change, step):
        assert message.startswith("the gradient of ")
        assert message.endswith(" was changed after backward had sent it.")
        assert "second.weight" in message or change in (clipped, unscaled)
        assert hint is not None
        assert "sync.step(max_norm=…)" in hint


@pytest.mark.parametrize("text", IN_BACKWARD)
def test_a_gradient_removed_after_backward_is_refused(pool: Pool, text: str) -> None:
    for message, hint in pool.run(changed, 2, text, cleared, 1):
        assert message == "second.weight lost its gradient between backward and sync.step()."
        assert hint is not None
        assert "sync.step() clears gradients itself" in hint


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


@pytest.mark.parametrize("text", IN_STEP)
def test_before_step_a_gradient_is_this_ranks_own(pool: Pool, text: str) -> None:
    for steps in pool.run(seen_before_step, 2, text, torch.float32, ((0, 1),)):
        for seen, own in steps:
            assert torch.equal(seen, own)


@pytest.mark.parametrize(
    ("text", "dtype", "hosts"),
    [
        *[(text, torch.float32, ((0, 1),)) for text in IN_BACKWARD],
        ("shared_memory", torch.bfloat16, ((0, 1),)),
        ("shared_memory", torch.float32, ((0,), (1,))),
    ],
)
def test_backward_returns_with_the_mean(pool: Pool, text: str, dtype: torch.dtype, hosts: Any) -> None:
    ranks = pool.run(seen_before_step, 2, text, dtype, hosts)
    for (first, own), (second, other) in zip(*ranks, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, (own + other) / 2)


class Passes:
    """Ways to compute the gradients of a step in several backward passes, or in nested ones."""

    @staticmethod
    def twice(sync: Sync, step: int) -> None:
        for number in (step, step + 50):
            sync.model(batch(sync.rank, number)).sum().backward()

    @staticmethod
    def then_accumulating(sync: Sync, step: int) -> None:
        sync.model(batch(sync.rank, step)).sum().backward()
        with sync.accumulate():
            sync.model(batch(sync.rank, step + 50)).sum().backward()

    @staticmethod
    def only_accumulating(sync: Sync, step: int) -> None:
        with sync.accumulate():
            Passes.twice(sync, step)

    @staticmethod
    def then_a_part(sync: Sync, step: int) -> None:
        sync.model(batch(sync.rank, step)).sum().backward()
        sync.model(batch(sync.rank, step + 50), skip=True).sum().backward()

    @staticmethod
    def part_by_part(sync: Sync, step: int) -> None:
        x = batch(sync.rank, step)
        for layer in sync.strategy.model.children():
            layer(x).sum().backward()

    @staticmethod
    def discarded(sync: Sync, step: int) -> None:
        sync.model(batch(sync.rank, step)).sum().backward()
        sync.optimizer.zero_grad()
        sync.model(batch(sync.rank, step + 50)).sum().backward()

    @staticmethod
    def graph_kept(sync: Sync, step: int) -> None:
        loss = sync.model(batch(sync.rank, step)).sum()
        loss.backward(retain_graph=True)
        (3 * loss).backward()

    @staticmethod
    def first_layers_nested(sync: Sync, step: int) -> None:
        model, x = sync.strategy.model, batch(sync.rank, step).requires_grad_()
        inner = checkpoint(lambda x: model.second(torch.tanh(model.first(x))), x, use_reentrant=True)  # type: ignore[operator]
        model.last(inner).sum().backward()  # type: ignore[operator]

    @staticmethod
    def last_layers_nested(sync: Sync, step: int) -> None:
        model, x = sync.strategy.model, batch(sync.rank, step)
        outer = torch.tanh(model.first(x))  # type: ignore[operator]
        checkpoint(lambda x: model.last(torch.tanh(model.second(x))), outer, use_reentrant=True).sum().backward()  # type: ignore[operator,union-attr]

    @staticmethod
    def nested_after_accumulating(sync: Sync, step: int) -> None:
        """The last pass does not reach one layer, and its last gradients come from a nested pass."""
        with sync.accumulate():
            sync.model(batch(sync.rank, step)).sum().backward()
        model, x = sync.strategy.model, batch(sync.rank, step + 50).requires_grad_()
        model.last(checkpoint(model.first, x, use_reentrant=True)).sum().backward()  # type: ignore[operator]

    @staticmethod
    def gradients_of_inputs(sync: Sync, step: int) -> None:
        """A gradient penalty: `torch.autograd.grad` runs no hook, and its result is part of the loss."""
        x = batch(sync.rank, step).requires_grad_()
        (slope,) = torch.autograd.grad(sync.model(x).sum(), x, create_graph=True)
        (sync.model(x).sum() + slope.square().sum()).backward()


PASSES = [name for name in vars(Passes) if not name.startswith("_")]


def several_passes(comm: Comm, text: str, names: Sequence[str], allow_unused: bool) -> list[Tensor]:
    """Return, for each way, the weights after some steps."""
    found = []
    for name in names:
        sync = attach(comm, text, allow_unused=allow_unused)
        for step in range(3):
            getattr(Passes, name)(sync, step)
            sync.step()
        found.append(weights(sync))
        sync.detach()
    return found


@pytest.mark.parametrize("allow_unused", [False, True])
def test_gradients_of_several_passes_add_up(pool: Pool, allow_unused: bool) -> None:
    expected = pool.run(several_passes, 3, "allreduce", PASSES, allow_unused)[0]
    for text in IN_BACKWARD:
        for found in pool.run(several_passes, 3, text, PASSES, allow_unused):
            for name, one, other in zip(PASSES, found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


def passed_twice(comm: Comm, text: str) -> tuple[str, str | None]:
    sync = attach(comm, text)
    try:
        Passes.twice(sync, 0)
    except WorkloadError as error:
        return error.message, error.hint
    finally:
        sync.strategy.abandon()
    return "no error", None


@pytest.mark.parametrize("text", IN_STEP)
def test_two_backward_passes_in_a_step_need_accumulate(pool: Pool, text: str) -> None:
    for message, hint in pool.run(passed_twice, 2, text):
        assert "got a gradient twice in one step" in message
        assert hint is not None
        assert "sync.accumulate()" in hint


class Joined(nn.Module):
    """Model that concatenates parameters: their gradients are views of one tensor, with one version counter."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the input by all of them."""
        return torch.tanh(x @ torch.cat(tuple(self.parts)).view(3, 5).t())


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def train_joined(comm: Comm, text: str, hooked: bool, change: bool) -> Tensor | str:
    """Return the weights after steps of three micro-batches each, or the error.

    Hooks from before `attach` may halve gradients before they are sent, and code after backward may change one.
    """
    model = Joined()
    for parameter in model.parameters() if hooked else ():
        parameter.register_post_accumulate_grad_hook(halve)
    sync = Sync(model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), create(text), comm, "local")
    try:
        for step in range(3):
            for number in range(3):
                with sync.microbatch(last=number == 2):
                    sync.model(batch(comm.rank, 10 * step + number)).sum().backward()
            if change:
                gradient = model.parts[1].grad
                assert gradient is not None
                gradient.mul_(0.5)
            sync.step()
        found = weights(sync)
        sync.detach()
    except WorkloadError as error:
        sync.strategy.abandon()
        return error.message
    return found


@pytest.mark.parametrize("hooked", [False, True])
def test_gradients_that_share_a_version_counter_may_accumulate(pool: Pool, hooked: bool) -> None:
    expected = pool.run(train_joined, 2, "allreduce", hooked, False)[0]
    assert isinstance(expected, Tensor)
    for text in OVERLAPPED:
        for found in pool.run(train_joined, 2, text, hooked, False):
            assert isinstance(found, Tensor), f"{text}: {found}"
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("text", IN_STEP)
def test_a_change_to_one_of_them_is_refused_by_its_name(pool: Pool, text: str) -> None:
    for message in pool.run(train_joined, 2, text, False, True):
        assert message == "the gradient of parts.1 was changed after backward had sent it."


class DeliberateError(Exception):
    """Error raised on purpose."""


def after_an_error(comm: Comm, text: str) -> str:
    """Return the error of a backward pass after one that failed, with some of its gradients sent."""
    sync = attach(comm, text)

    def fail(_: Tensor) -> None:
        raise DeliberateError

    hook = sync.strategy.model.get_parameter("first.weight").register_hook(fail)
    with pytest.raises(DeliberateError):
        sync.model(batch(comm.rank, 0)).sum().backward()
    hook.remove()
    try:
        sync.model(batch(comm.rank, 1)).sum().backward()
    except WorkloadError as error:
        return error.message
    finally:
        sync.strategy.abandon()
    return "no error"


@pytest.mark.parametrize("text", OVERLAPPED)
def test_a_pass_after_one_that_failed_is_refused(pool: Pool, text: str) -> None:
    for message in pool.run(after_an_error, 2, text):
        assert message.endswith("got a gradient twice in one step; the first one has already been sent.")


def with_hook(comm: Comm, text: str, kind: str) -> Tensor | str:
    """Return the weights after steps with a user's hook that was added after `attach`, or the error."""
    sync = attach(comm, text)
    parameter = sync.strategy.model.get_parameter("second.weight")
    seen: list[float] = []

    def after_accumulation(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.norm().item())
        if kind == "writes":
            parameter.grad.mul_(0.5)

    if kind == "changes the gradient":
        parameter.register_hook(lambda gradient: 0.5 * gradient)
    else:
        parameter.register_post_accumulate_grad_hook(after_accumulation)
    try:
        for step in range(3):
            sync.model(batch(comm.rank, step)).sum().backward()
            sync.step()
        return weights(sync)
    except WorkloadError as error:
        return error.message
    finally:
        sync.strategy.abandon()


@pytest.mark.parametrize("text", OVERLAPPED)
def test_hooks_added_after_attach_take_effect_or_are_refused(pool: Pool, text: str) -> None:
    for kind in ("changes the gradient", "reads"):
        expected = pool.run(with_hook, 2, "allreduce", kind)[0]
        for found in pool.run(with_hook, 2, text, kind):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for found in pool.run(with_hook, 2, text, "writes"):
        assert found == "the gradient of second.weight was changed after backward had sent it."


def first_pass_on_one_rank(comm: Comm, text: str) -> str:
    """Make two backward passes per step, of which the first reaches, from the second step on, only rank 0's model."""
    sync = attach(comm, text, allow_unused=True)
    try:
        for step in range(4):
            if comm.rank == 0 or step == 0:
                sync.model(batch(comm.rank, step)).sum().backward()
            sync.model(batch(comm.rank, step + 50)).sum().backward()
            sync.step()
    except WorkloadError as error:
        sync.strategy.abandon()
        return error.message if error.hint else "no hint"
    return "no error"


@pytest.mark.parametrize("text", IN_BACKWARD)
def test_passes_that_some_ranks_do_not_make_are_refused_on_all_ranks(pool: Pool, text: str) -> None:
    (message,) = set(pool.run(first_pass_on_one_rank, 2, text))
    assert message.startswith("a backward pass reached parameters on some ranks only")
