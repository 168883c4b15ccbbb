"""Tests of the life of a `Sync`: `with`, close, errors in between, models out of scope, loaders with processes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.comm import Comm
from paceline.errors import PacelineError
from paceline.strategies.allreduce import AllReduce
from paceline.strategies.registry import create
from paceline.training.sync import Sync
from ranks import Pool
from registered import in_turn
from training.usage.loops import (
    RANKS,
    STRATEGIES,
    Loop,
    Results,
    batch_of,
    loss_of,
    make_model,
    sgd,
    train,
    usage_tests,
    weights,
)

pytestmark = pytest.mark.takes(4)

IN_TURN = in_turn(STRATEGIES, 7)


def attach(comm: Comm, text: str, model: nn.Module, *, allow_unused: bool = False) -> Sync:
    return Sync(model, sgd, create(text, allow_unused=allow_unused), comm, "broadcast")


def message(call: Callable[[], Any]) -> str:
    """Return the message and the hint of the error that a call must raise."""
    with pytest.raises(PacelineError) as caught:
        call()
    return f"{caught.value.message} hint: {caught.value.hint}"


# Training.


def in_a_function(loop: Loop) -> Results:
    """Only the `Sync` is kept; the model goes out of scope."""

    def begin() -> Any:
        return loop.attach(make_model())

    sync = begin()
    gc.collect()
    train(loop, sync)
    with sync.agreed() as model:
        return [weights(model)]


def after_an_error_in_forward(loop: Loop) -> Results:
    """An error in forward, on all ranks, is caught, and training continues."""
    model = make_model()
    sync = loop.attach(model)
    train(loop, sync, 2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        sync.model(torch.ones(2, 7, dtype=torch.float64))
    train(loop, sync, 2, start=2)
    return [weights(model)]


def loader_with_processes(loop: Loop) -> Results:
    """A `DataLoader` forks worker processes while the strategy has threads and connections."""
    model = make_model()
    sync = loop.attach(model)
    parts = [batch_of(step) for step in range(4)]
    inputs = torch.cat([loop.share(x) for x, _ in parts])
    targets = torch.cat([loop.share(y) for _, y in parts])
    for _ in range(2):  # Each epoch forks again.
        loader = DataLoader(TensorDataset(inputs, targets), len(inputs) // 4, num_workers=1)
        for x, y in loader:
            loss_of(sync.model(x), y).backward()
            sync.step()
    return [weights(model)]


USAGES = [in_a_function, after_an_error_in_forward, loader_with_processes]


test_training_is_that_of_one_process, test_the_results_depend_on_synchronisation = usage_tests(USAGES, turn=6)


# Errors.


def after_close(comm: Comm, text: str) -> list[str]:
    model, loop = make_model(), Loop(text, comm)
    with attach(comm, text, model) as sync:
        train(loop, sync)
    sync.close()
    found = [message(call) for call in (sync.step, sync.accumulate, lambda: sync.mean(1.0), sync.agreed().__enter__)]
    if comm.rank == 0:  # The model itself needs no other rank.
        model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    return found


def without_gradients(comm: Comm, text: str) -> list[str]:
    """Return the errors of a step before any backward pass, and of a second step after one."""
    sync = attach(comm, text, make_model())
    found = [message(sync.step)]
    train(Loop(text, comm), sync, 1)
    found.append(message(sync.step))
    sync.detach()
    return found


def steps_without_gradients_where_allowed(comm: Comm, text: str) -> bool:
    """Return whether steps without gradients on any rank leave the weights as they are."""
    model = make_model()
    sync = attach(comm, text, model, allow_unused=True)
    train(Loop(text, comm), sync, 2)
    before = weights(model)
    sync.optimizer.param_groups[0]["momentum"] = 0.0
    sync.step()
    sync.step()
    after = weights(model)
    sync.detach()
    return torch.equal(before, after)


def wrong_norms(comm: Comm, text: str) -> list[str]:
    model = make_model()
    sync = attach(comm, text, model)
    x, y = Loop(text, comm).batches(1)[0]
    loss_of(sync.model(x), y).backward()
    closure: Any = lambda: loss_of(sync.model(x), y)  # noqa: E731
    found = [message(partial(sync.step, norm)) for norm in (0.0, -1.0, float("nan"), closure)]
    sync.step(max_norm=float("inf"))
    sync.detach()
    return found


def error_inside_with(comm: Comm, text: str) -> tuple[int, set[type]]:
    """Return the number of hooks that an error on all ranks left on the model, and the classes of its parameters."""
    model, loop = make_model(), Loop(text, comm)

    def fail() -> None:
        with attach(comm, text, model) as sync:
            train(loop, sync, 2)
            sync.model(loop.batches(1)[0][0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    hooks = [hook for module in model.modules() for hook in (*module._forward_pre_hooks, *module._forward_hooks)]
    return len(hooks), {type(parameter) for parameter in model.parameters()}


def error_in_backward(comm: Comm, text: str) -> bool:
    """Close after an error in the middle of backward on all ranks; return whether the weights are still finite."""
    model, loop = make_model(), Loop(text, comm)
    sync = attach(comm, text, model)
    train(loop, sync, 2)

    def fail(_: Any) -> None:
        raise ZeroDivisionError

    handle = model[2].weight.register_hook(fail)
    x, y = loop.batches(1)[0]
    with pytest.raises(ZeroDivisionError):
        loss_of(sync.model(x), y).backward()
    handle.remove()
    sync.close()
    return bool(weights(model).isfinite().all())


def frozen_later(comm: Comm, text: str) -> str:
    model, loop = make_model(), Loop(text, comm)
    sync = attach(comm, text, model)
    train(loop, sync, 1)
    model[0].requires_grad_(False)
    x, y = loop.batches(1)[0]
    loss_of(sync.model(x), y).backward()
    found = message(sync.step)
    sync.strategy.abandon()
    return found


CASES = [
    [without_gradients, steps_without_gradients_where_allowed, wrong_norms, after_close],
    [frozen_later],
    [error_inside_with],
]
"""Cases that share groups. The last of each list closes them, or leaves messages in them that no rank waits for."""


def run_errors(comm: Comm, text: str, number: int) -> dict[str, Any]:
    """Run the cases of one list with one strategy."""
    return {case.__name__: case(comm, text) for case in CASES[number]}


@pytest.fixture(scope="module")
def errors(pool: Pool) -> Callable[[str], list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}

    def of(text: str) -> list[dict[str, Any]]:
        if text not in found:
            ran = [pool.run(run_errors, RANKS, text, number) for number in range(len(CASES))]
            found[text] = [{**one, **two, **three} for one, two, three in zip(*ran, strict=True)]
        return found[text]

    return of


Errors = Callable[[str], list[dict[str, Any]]]


@pytest.mark.parametrize("text", IN_TURN)
def test_use_after_close_is_refused(errors: Errors, text: str) -> None:
    for rank in errors(text):
        (found,) = set(rank["after_close"])
        assert found.startswith(f"the model is no longer attached to {text.partition(':')[0]}: close() was called.")


@pytest.mark.parametrize("text", IN_TURN)
def test_a_step_without_gradients_is_refused(errors: Errors, text: str) -> None:
    for number, rank in enumerate(errors(text)):
        for found in rank["without_gradients"]:
            assert found.startswith(f"6 parameters got no gradient on rank {number}: 0.weight, 0.bias")


@pytest.mark.parametrize("text", IN_TURN)
def test_a_step_without_gradients_changes_nothing_where_allowed(errors: Errors, text: str) -> None:
    assert all(rank["steps_without_gradients_where_allowed"] for rank in errors(text))


@pytest.mark.parametrize("text", IN_TURN)
def test_norms_that_are_not_positive_are_refused(errors: Errors, text: str) -> None:
    for rank in errors(text):
        zero, negative, nan, closure = rank["wrong_norms"]
        assert zero == "max_norm is 0.0. hint: pass a number that is more than 0"
        assert negative.startswith("max_norm is -1.0.")
        assert nan.startswith("max_norm is nan.")
        assert closure.startswith("step() got an object of type function as max_norm. hint: pass a number; strategies")


@pytest.mark.parametrize("text", IN_TURN)
def test_layers_that_are_frozen_after_attach_are_named(errors: Errors, text: str) -> None:
    assert all("0.weight" in rank["frozen_later"] for rank in errors(text))


@pytest.mark.parametrize("text", IN_TURN)
def test_an_error_inside_with_leaves_nothing_on_the_model(errors: Errors, text: str) -> None:
    assert all(rank["error_inside_with"] == (0, {nn.Parameter}) for rank in errors(text))


@pytest.mark.parametrize("text", IN_TURN)
def test_close_after_an_error_in_backward(pool: Pool, text: str) -> None:
    assert pool.run(error_in_backward, RANKS, text) == [True] * RANKS


def copy_of_ddp(comm: Comm) -> str:
    sync = attach(comm, "ddp", make_model())
    found = message(lambda: copy.deepcopy(sync.model))
    sync.detach()
    return found


def test_a_copy_of_the_wrapped_model_is_refused(pool: Pool) -> None:
    (found,) = set(pool.run(copy_of_ddp, RANKS))
    assert found == (
        "sync.model cannot be copied or saved under ddp: it belongs to a process group. "
        "hint: copy or save the model that was passed to attach()"
    )


class Alone(AllReduce):
    """Strategy whose other ranks never answer."""

    def agree(self, gradients: Sequence[Tensor]) -> None:  # noqa: ARG002
        raise RuntimeError("[gloo] Timed out waiting 3000ms for recv operation to complete")


def time_out(comm: Comm) -> list[str]:
    sync = Sync(make_model(), sgd, Alone(), comm, "broadcast")
    x, y = Loop("", comm).batches(1)[0]
    loss_of(sync.model(x), y).backward()
    with pytest.raises(RuntimeError, match="Timed out") as caught:
        sync.step()
    sync.detach()
    return caught.value.__notes__


def test_a_time_out_says_what_all_ranks_must_do(pool: Pool) -> None:
    for rank, (note,) in enumerate(pool.run(time_out, RANKS)):
        assert note.startswith(
            f"hint: rank {rank} waited in sync.step() for another rank; all ranks must make the same"
        )


def unused_under_ddp(comm: Comm) -> tuple[str, bool]:
    """Return the error for an unused parameter, and whether the weights are as before: DDP averaged only some."""
    model = make_model()
    model.register_parameter("spare", nn.Parameter(torch.zeros(3, dtype=torch.float64)))
    sync = attach(comm, "ddp", model)
    before = weights(model)
    x, y = Loop("ddp", comm).batches(1)[0]
    loss_of(sync.model(x), y).backward()
    found = message(sync.step)
    after = weights(model)
    sync.detach()
    return found, torch.equal(before, after)


def test_an_unused_parameter_under_ddp_is_named_before_the_step(pool: Pool) -> None:
    for rank, (found, unchanged) in enumerate(pool.run(unused_under_ddp, RANKS)):
        assert found.startswith(f"1 parameter got no gradient on rank {rank}: spare.")
        assert unchanged


def accumulated_under_ddp(comm: Comm) -> str:
    sync = attach(comm, "ddp", make_model(), allow_unused=True)
    x, y = Loop("ddp", comm).batches(1)[0]
    with sync.accumulate():
        loss_of(sync.model(x), y).backward()
    found = message(sync.step)
    sync.detach()
    return found


def test_gradients_that_ddp_has_not_averaged_are_refused_with_unused_parameters(pool: Pool) -> None:
    for found in pool.run(accumulated_under_ddp, RANKS):
        assert found.startswith("ddp did not average the gradients of the last backward pass.")


def sparse(comm: Comm, text: str) -> str:
    torch.manual_seed(0)
    model = nn.Embedding(5, 2, sparse=True)
    sync = Sync(model, lambda named: torch.optim.SGD(named, lr=0.1), create(text), comm, "broadcast")

    def train_one_step() -> None:
        sync.model(torch.tensor([1])).sum().backward()
        sync.step()

    found = message(train_one_step)
    sync.strategy.abandon()
    return found


@pytest.mark.parametrize("text", in_turn([text for text in STRATEGIES if not text.startswith("ddp")], 8))
def test_sparse_gradients_are_refused(pool: Pool, text: str) -> None:
    (found,) = set(pool.run(sparse, RANKS, text))
    assert found.startswith("the gradient of weight is sparse; strategies send only dense gradients.")
