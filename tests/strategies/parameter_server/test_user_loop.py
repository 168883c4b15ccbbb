"""`parameter_server` in a user's loop: loaded and changed weights, settings of the optimiser, GradScaler."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from paceline.comm import Comm, close_comm, open_comm
from paceline.errors import PacelineError, RankError, UsageError, WorkloadError
from paceline.strategies.base.abilities import ServesParameters
from paceline.strategies.base.scaling import checked_scaler
from paceline.strategies.base.strategy import NamedParameters, Strategy
from paceline.strategies.registry import create
from paceline.training.sync import Sync
from ranks import Pool
from strategies.parameter_server.test_strategy import adam, make_model, on_extra_ranks, sgd, weights

pytestmark = pytest.mark.takes(12)

SYNCHRONOUS = ["parameter_server", "parameter_server:servers=2"]
ASYNCHRONOUS = ["parameter_server:asynchronous=true", "parameter_server:asynchronous=true,servers=2"]
SHARES = 3
"""Number of steps in a round; in each, every rank trains on its own samples."""
CHANGED = "weights were changed outside step()"
Change = Callable[[Sync], None]


def train(sync: Sync, round_: int, scheduler: Any = None, max_norm: float | None = None) -> None:
    """Train a round; under asynchronous servers, one rank after the other."""
    for step in range(SHARES):
        torch.manual_seed(100 * round_ + 10 * step + sync.rank)
        for rank in [sync.rank] if sync.strategy.lockstep else range(sync.ranks):
            if rank == sync.rank:
                sync.model(torch.randn(4, 6, dtype=next(sync.model.parameters()).dtype)).square().mean().backward()
                sync.step(max_norm)
                if scheduler is not None:
                    scheduler.step()
            if not sync.strategy.lockstep:
                sync.comm.control.barrier()


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


# Loading.


def saved(optimizer: Any = sgd) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a checkpoint with other weights, momentum and learning rate than those of a new run."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    made = optimizer(list(model.named_parameters()))
    model(torch.randn(4, 6)).square().mean().backward()
    made.step()
    made.param_groups[0]["lr"] = 0.02
    return copy.deepcopy(model.state_dict()), copy.deepcopy(made.state_dict())


def resume(comm: Comm, text: str, when: str, parts: Sequence[str]) -> list[Tensor]:
    """Load a checkpoint before or after `attach`, or after a round; return the weights after each of two rounds."""
    model, (loaded, loaded_optimizer) = make_model(), saved()

    def make(parameters: NamedParameters) -> torch.optim.Optimizer:
        optimizer = sgd(parameters)
        if when == "before" and "optimizer" in parts:
            optimizer.load_state_dict(loaded_optimizer)
        return optimizer

    if when == "before" and "model" in parts:
        model.load_state_dict(loaded)
    with Sync(model, make, create(text), comm, "broadcast") as sync:
        if when == "later":
            train(sync, 7)
        if when != "before":
            if "model" in parts:
                model.load_state_dict(loaded)
            if "optimizer" in parts:
                sync.optimizer.load_state_dict(loaded_optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(sync.optimizer, 2, gamma=0.1)
        found = []
        for round_ in range(2):
            train(sync, round_, scheduler)
            with sync.agreed():
                found.append(weights(model))
    return found


@pytest.mark.parametrize("text", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_a_checkpoint_can_be_loaded_before_and_after_attach(pool: Pool, text: str) -> None:
    both = ("model", "optimizer")
    before = pool.run(resume, 2, text, "before", both)
    again = pool.run(resume, 2, text, "after", both)
    later = pool.run(resume, 2, text, "later", both)
    if text in SYNCHRONOUS:
        right = pool.run(resume, 2, "allreduce", "before", both)
        torch.testing.assert_close(before, right)
    for found in (before, again, later):
        torch.testing.assert_close(found, [before[0]] * 2, rtol=0, atol=0)


@pytest.mark.parametrize("text", [*SYNCHRONOUS, *ASYNCHRONOUS])
@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_loading_one_part_keeps_the_other(pool: Pool, text: str, part: str) -> None:
    before = pool.run(resume, 2, text, "before", (part,))
    after = pool.run(resume, 2, text, "after", (part,))
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert not torch.equal(after[0][0], pool.run(resume, 2, text, "after", ())[0][0])


def load_on_rank_0(comm: Comm, part: str) -> str:
    """Load on rank 0 alone, where asynchronous servers wait for all ranks; return the message of the error."""
    close_comm(comm)
    ours = open_comm(range(2), device=comm.device, backend="gloo", timeout_s=1.0)
    if ours is None:
        return "nothing"
    sync = Sync(make_model(), sgd, create(ASYNCHRONOUS[0]), ours, "local")
    message = "nothing"
    if sync.rank == 0:
        model, optimizer = saved()
        try:
            sync.strategy.model.load_state_dict(model) if part == "model" else sync.optimizer.load_state_dict(optimizer)
        except RankError as error:
            message = error.message
    sync.strategy.abandon()
    close_comm(ours)
    return message


@pytest.mark.parametrize(("part", "call"), [("model", "model"), ("optimizer", "sync.optimizer")])
def test_asynchronous_servers_refuse_a_load_on_one_rank(pool: Pool, part: str, call: str) -> None:
    first, *others = pool.run(load_on_rank_0, 4, part)
    assert first == f"rank 0 called {call}.load_state_dict(), but not all ranks did so within 1 s."
    assert set(others) == {"nothing"}


def state_dict_of(comm: Comm, text: str) -> Any:
    """Return the state dict of the optimiser after a round, or the message of the error, and the hint."""
    with Sync(make_model(), sgd, create(text), comm, "local") as sync:
        train(sync, 0)
        with sync.agreed():
            try:
                found = sync.optimizer.state_dict()
            except WorkloadError as error:
                found = {"error": (error.message, error.hint)}
            comm.control.barrier()
    return found


def assert_same(found: dict[str, Any], right: dict[str, Any]) -> None:
    torch.testing.assert_close(found["state"], right["state"])
    assert found["param_groups"] == right["param_groups"]


def test_an_optimiser_returns_its_whole_state_or_none(pool: Pool) -> None:
    right = pool.run(state_dict_of, 2, "allreduce")[0]
    beside, other = pool.run(state_dict_of, 2, SYNCHRONOUS[0])
    assert_same(beside, right)
    message = "rank {} does not have the whole state of the optimiser: servers on other ranks keep the state of {}."
    everywhere = "call sync.strategy.state() on every rank, or use servers=1 and save on rank 0"
    assert other["error"] == (message.format(1, "4 parameters"), "call sync.optimizer.state_dict() on rank 0 only")
    first, second = pool.run(state_dict_of, 2, SYNCHRONOUS[1])
    assert first["error"] == (message.format(0, "3 parameters"), everywhere)
    assert second["error"] == (message.format(1, "1 parameter"), everywhere)
    (alone,), (right_alone,) = pool.run(state_dict_of, 1, ASYNCHRONOUS[0]), pool.run(state_dict_of, 1, "allreduce")
    assert_same(alone, right_alone)
    first, second = pool.run(state_dict_of, 2, ASYNCHRONOUS[1])
    assert_same(first, second)
    assert list(first["state"]) == list(right["state"])
    assert first["param_groups"] == right["param_groups"], "the learning rate is the user's own"


def copy_a_model(comm: Comm, text: str) -> list[str]:
    """Load into copies of an attached model, and into the model after the end; return the hooks left on it."""
    model, (loaded, _) = make_model(), saved()
    with Sync(model, sgd, create(text), comm, "local") as sync:
        if comm.rank == 0:  # A copy has no servers, so that a load waits for no other rank.
            pickled = pickle.loads(pickle.dumps(model))  # noqa: S301
            for copied in (copy.deepcopy(model), pickled, AveragedModel(model).module):
                copied.load_state_dict(loaded)
                assert not torch.equal(weights(copied), weights(model))
        train(sync, 0)
        optimizer = sync.optimizer
        hooks = [model._load_state_dict_post_hooks, optimizer._optimizer_state_dict_post_hooks]
        assert all(hooks)
        hooks.append(optimizer._optimizer_load_state_dict_post_hooks)
    model.load_state_dict(loaded)
    return [str(hook) for hook in hooks if hook]


def test_copies_of_a_model_have_no_servers(pool: Pool) -> None:
    for text in (SYNCHRONOUS[1], ASYNCHRONOUS[1]):
        assert pool.run(copy_a_model, 2, text) == [[], []]


# Weights and settings that a loop changes by itself.


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
    extra = nn.Parameter(torch.zeros(3))
    sync.optimizer.add_param_group({"params": [("extra", extra)]})


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


# Settings, precision and calls that a loop may make.


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


class NoGroups:
    """Optimiser without the interface of torch's."""

    def __init__(self, parameters: NamedParameters) -> None:
        self.parameters = [parameter for _, parameter in parameters]
        self.state: dict[Tensor, Any] = {}


def attach_without_groups(comm: Comm, text: str) -> str:
    make: Any = NoGroups
    try:
        Sync(make_model(), make, create(text), comm, "local")
    except WorkloadError as error:
        return error.message
    return "nothing"


def test_an_optimiser_without_groups_is_refused(pool: Pool) -> None:
    for text in (SYNCHRONOUS[0], ASYNCHRONOUS[0]):
        found = pool.run(attach_without_groups, 1, text)
        assert found == ["the optimiser NoGroups has no `param_groups`, which servers need."]


def sum_large_gradients(comm: Comm, dtype: torch.dtype) -> float:
    """Return the weight after a step with a gradient whose sum over the ranks has no finite value in float16."""
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    nn.init.zeros_(model.weight)
    with Sync(model, lambda named: torch.optim.SGD(named, lr=2**-10), create(SYNCHRONOUS[0]), comm, "local") as sync:
        (sync.model(torch.ones(1, 1, dtype=dtype)) * (40960 + 4096 * comm.rank)).sum().backward()
        sync.step()
    return float(model.weight.detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_in_half_precision_do_not_overflow(pool: Pool, dtype: torch.dtype) -> None:
    assert pool.run(sum_large_gradients, 2, dtype) == [-42.0, -42.0]


def train_scaled(comm: Comm, text: str) -> Any:
    """Train with a GradScaler; rank 1 overflows in one step. Return weights, scales and which steps changed weights."""
    return _train_scaled(comm, create(text))


def train_scaled_extra(comm: Comm, text: str, servers: int) -> Any:
    return on_extra_ranks(comm, text, servers, _train_scaled)


def _train_scaled(comm: Comm, strategy: Strategy) -> Any:
    model = make_model()
    if comm.is_server:
        strategy.attach(model, sgd, comm)
        assert isinstance(strategy, ServesParameters)
        strategy.serve()
        strategy.close()
        return None
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scales, changes = [], []
    sync = Sync(model, sgd, strategy, comm, "local")
    for step in range(6):
        torch.manual_seed(10 * step + comm.rank)
        before = weights(model)
        loss = sync.model(torch.randn(4, 6)).square().mean()
        scaler.scale(loss * (torch.inf if step == 2 and comm.rank == comm.world_size - 1 else 1)).backward()
        sync.step(max_norm=0.05 if step % 2 else None, scaler=checked_scaler(scaler, strategy))
        scales.append(scaler.get_scale())
        changes.append(not torch.equal(weights(model), before))
        assert all(parameter.grad is None for parameter in model.parameters())
    sync.detach()
    return weights(model), scales, changes


@pytest.mark.parametrize("text", SYNCHRONOUS)
def test_workers_unscale_and_skip_together(pool: Pool, text: str) -> None:
    right = pool.run(train_scaled, 2, "allreduce")
    torch.testing.assert_close(pool.run(train_scaled, 2, text), right)
    assert right[0][1:] == ([1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0], [True, True, False, True, True, True])


def test_servers_on_separate_ranks_wait_during_a_skipped_step(pool: Pool) -> None:
    right = pool.run(train_scaled, 2, "allreduce")
    found = pool.run(train_scaled_extra, 4, "parameter_server:extra=true,servers=2", 2)
    torch.testing.assert_close(found[:2], right)


def test_asynchronous_servers_refuse_a_scaler() -> None:
    with pytest.raises(UsageError, match="does not support a GradScaler in asynchronous mode"):
        checked_scaler(torch.amp.GradScaler("cpu"), create(ASYNCHRONOUS[0]))


def without_a_step(comm: Comm, text: str) -> Tensor:
    """Use every call that needs no step; return the agreed weights."""
    torch.manual_seed(comm.rank)
    model = nn.Linear(6, 3)
    with Sync(model, adam, create(text), comm, "local") as sync:
        sync.model.eval()
        with sync.agreed() as agreed:
            found = weights(agreed)
        state = sync.strategy.state()
        assert not sync.strategy.load(state)
        if not sync.strategy.lockstep:
            assert sync.optimizer.state_dict()["state"] == {}
        sync.optimizer.zero_grad()
        assert torch.equal(weights(model), found)
    return found


@pytest.mark.parametrize("text", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_a_run_may_have_no_step(pool: Pool, text: str) -> None:
    first, second = pool.run(without_a_step, 2, text)
    assert torch.equal(first, second)
