"""Changes of weights and settings in a user's loop: the same on every rank, or refused by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import Comm
from paceline.errors import PacelineError, WorkloadError
from paceline.strategies.base.abilities import ServesParameters
from paceline.strategies.base.strategy import NamedParameters, Strategy
from paceline.strategies.registry import create
from paceline.training.sync import Sync
from ranks import Pool
from strategies.parameter_server.test_load_hooks import ASYNCHRONOUS, SYNCHRONOUS, saved, train
from strategies.parameter_server.test_strategy import make_model, on_extra_ranks, sgd, weights

pytestmark = pytest.mark.takes(5)

CHANGED = "weights were changed outside step()"
Change = Callable[[Sync], None]


def error_of(sync: Sync, change: Change) -> str:
    """Train a round, make a change on this rank, train another round; return the message of the error."""
    try:
        with sync:
            train(sync, 0)
            change(sync)
            train(sync, 1)
    except PacelineError as error:
        return error.message
    return "nothing"


def scale_weights(sync: Sync) -> None:
    with torch.no_grad():
        for parameter in sync.model.parameters():
            parameter.mul_(0.9)


def swap_weights(sync: Sync) -> None:
    """Evaluate other weights, and restore the trained ones."""
    kept = [parameter.detach().clone() for parameter in sync.model.parameters()]
    scale_weights(sync)
    with torch.no_grad():
        for parameter, before in zip(sync.model.parameters(), kept, strict=True):
            parameter.copy_(before)


def load_model(sync: Sync) -> None:
    sync.model.load_state_dict(saved()[0])


def load_optimizer(sync: Sync) -> None:
    sync.optimizer.load_state_dict(saved()[1])


def lower_rate(sync: Sync) -> None:
    sync.optimizer.param_groups[0]["lr"] = 0.001


def tensor_rate(sync: Sync) -> None:
    sync.optimizer.param_groups[0]["lr"] = torch.tensor(0.001)


def nesterov(sync: Sync) -> None:
    sync.optimizer.param_groups[0]["nesterov"] = True


def plateau(sync: Sync) -> None:
    """Let a scheduler decide by this rank's own loss."""
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(sync.optimizer, patience=0)
    for loss in (1.0, 1.0 + sync.rank, 1.0 - 0.5 * sync.rank):
        scheduler.step(loss)


def add_group(sync: Sync) -> None:
    """Move a parameter of the model to a group of its own."""
    group = sync.optimizer.param_groups[0]
    moved, name = group["params"].pop(), group["param_names"].pop()
    sync.optimizer.add_param_group({"params": [(name, moved)]})


def nothing(sync: Sync) -> None:
    """Change nothing."""


def errors_after(comm: Comm, text: str, change: Change, on: Sequence[int]) -> str:
    sync = Sync(make_model(), sgd, create(text), comm, "local")
    return error_of(sync, change if comm.rank in on else nothing)


@pytest.mark.parametrize("text", SYNCHRONOUS)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("change", [scale_weights, load_model])
def test_weights_that_one_rank_changes_are_refused(pool: Pool, text: str, rank: int, change: Change) -> None:
    found = pool.run(errors_after, 2, text, change, [rank])
    assert found == [f"{CHANGED} on rank {rank}, and not in the same way on all ranks."] * 2


@pytest.mark.parametrize(
    ("change", "ranks"),
    [(lower_rate, [0]), (tensor_rate, [1]), (nesterov, [1]), (load_optimizer, [0]), (plateau, [0, 1])],
)
def test_settings_of_one_rank_are_refused(pool: Pool, change: Change, ranks: list[int]) -> None:
    for text in SYNCHRONOUS:
        found = pool.run(errors_after, 2, text, change, ranks)
        assert found[0] == found[1]
        assert found[0].startswith("the optimiser on rank 1 has other settings than that on rank 0, or has loaded")


def trained_with(comm: Comm, text: str, change: Change, make: Any = sgd) -> Tensor:
    """Return the weights after three rounds, with a change on every rank between them."""
    model = make_model()
    with Sync(model, make, create(text), comm, "local") as sync:
        for round_ in range(3):
            train(sync, round_)
            change(sync)
        train(sync, 3)
    return weights(model)


@pytest.mark.parametrize("change", [scale_weights, swap_weights, load_model, lower_rate, tensor_rate, nesterov])
def test_changes_on_every_rank_take_effect(pool: Pool, change: Change) -> None:
    right = pool.run(trained_with, 2, "allreduce", change)
    for text in SYNCHRONOUS:
        torch.testing.assert_close(pool.run(trained_with, 2, text, change), right)


def test_weights_may_be_swapped_on_one_rank(pool: Pool) -> None:
    for text in (SYNCHRONOUS[1], ASYNCHRONOUS[1]):
        for rank in (0, 1):
            assert pool.run(errors_after, 2, text, swap_weights, [rank]) == ["nothing"] * 2


@pytest.mark.parametrize("text", ASYNCHRONOUS)
def test_asynchronous_servers_refuse_changed_weights(pool: Pool, text: str) -> None:
    (message,) = set(pool.run(errors_after_alone, 2, text, scale_weights))
    assert message == (
        "the weight 0.weight was changed outside step(), but asynchronous servers keep the weights: the change would "
        "be lost."
    )


@pytest.mark.parametrize("text", [SYNCHRONOUS[1], ASYNCHRONOUS[1]])
def test_parameter_groups_added_after_attach_are_refused(pool: Pool, text: str) -> None:
    (message,) = set(pool.run(errors_after_alone, 2, text, add_group))
    assert message == "the optimiser's parameter groups have changed since attach(); servers keep those of attach()."


def errors_after_alone(comm: Comm, text: str, change: Change) -> str:
    """Make a change on every rank; return the message of the error of the next step."""
    sync = Sync(make_model(), sgd, create(text), comm, "local")
    train(sync, 0)
    change(sync)
    sync.model(torch.randn(4, 6)).square().mean().backward()
    try:
        sync.step()
    except WorkloadError as error:
        message = error.message
    comm.control.barrier()
    sync.strategy.abandon()
    return message


class Renormalising(nn.Module):
    """Model with an embedding that changes its own weights in forward: the rows that this rank uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(8, 6, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the rows of some positive numbers."""
        return self.embedding(x.abs().sum(1).long() % 8)


def train_renormalising(comm: Comm, text: str) -> str:
    return error_of(Sync(Renormalising(), sgd, create(text), comm, "local"), nothing)


def test_an_embedding_that_renormalises_its_weights_is_refused(pool: Pool) -> None:
    assert pool.run(train_renormalising, 2, SYNCHRONOUS[0])[0].startswith(CHANGED)


def test_servers_on_separate_ranks_refuse_changed_weights(pool: Pool) -> None:
    found = pool.run(change_with_extra_servers, 4)
    assert found == [f"{CHANGED} on rank 0, and not in the same way on all ranks."] * 4


def change_with_extra_servers(comm: Comm) -> str:
    def play(own: Comm, strategy: Strategy) -> str:
        if not own.is_server:
            return error_of(Sync(make_model(), sgd, strategy, own, "local"), scale_weights)
        strategy.attach(make_model(), sgd, own)
        assert isinstance(strategy, ServesParameters)
        try:
            strategy.serve()
        except WorkloadError as error:
            return error.message
        return "nothing"

    return on_extra_ranks(comm, "parameter_server:extra=true,servers=2", 2, play)


def two_groups(parameters: NamedParameters) -> torch.optim.Optimizer:
    """Return AdamW with another learning rate, betas and no weight decay for biases."""
    biases = [pair for pair in parameters if pair[0].endswith("bias")]
    others = [pair for pair in parameters if not pair[0].endswith("bias")]
    groups = [{"params": others}, {"params": biases, "lr": 0.03, "betas": (0.5, 0.9), "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def test_groups_keep_their_own_settings(pool: Pool) -> None:
    right = pool.run(trained_with, 2, "allreduce", lower_rate, two_groups)
    torch.testing.assert_close(pool.run(trained_with, 2, SYNCHRONOUS[1], lower_rate, two_groups), right)
    (right_alone,) = pool.run(trained_with, 1, "allreduce", lower_rate, two_groups)
    torch.testing.assert_close(pool.run(trained_with, 1, ASYNCHRONOUS[0], lower_rate, two_groups), [right_alone])
