"""`parameter_server` on real ranks: options, synchronous and asynchronous training, and lost servers or workers."""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm import Comm, close_comm, open_comm
from paceline.config import RunConfig
from paceline.errors import RankError, UsageError
from paceline.experiments.checks import check_strategy
from paceline.strategies.base.abilities import LimitsRanks, ReportsMetrics, ServesParameters
from paceline.strategies.base.strategy import NamedParameters, Role, Strategy, uses_one_rank
from paceline.strategies.registry import create
from paceline.training.parity.proof import prove, serve_proof
from paceline.training.sync import Sync
from paceline.workloads.batches import Share
from ranks import GROUP_TIMEOUT_S, Pool
from training import cases

pytestmark = pytest.mark.takes(10)

ASYNCHRONOUS = "parameter_server:asynchronous=true"
OTHER_SETTINGS = {"lr": 0.01, "momentum": 0.5}


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("servers=0", "servers is 0"),
        ("asynchronous=true,max_staleness=-1", "max_staleness is -1"),
        ("max_staleness=3", "synchronous gradients are never stale"),
        ("over_limit=drop", "synchronous gradients are never stale"),
        ("asynchronous=true,over_limit=forget", "over_limit cannot be 'forget'"),
    ],
)
def test_invalid_options_are_refused(options: str, found: str) -> None:
    with pytest.raises(UsageError, match=found):
        create(f"parameter_server:{options}")


def test_roles_and_ranks() -> None:
    beside, extra = create("parameter_server:servers=2"), create("parameter_server:servers=2,extra=true")
    assert beside.roles(3) == [Role.WORKER] * 3
    assert extra.roles(3) == [Role.WORKER, Role.SERVER, Role.SERVER]
    assert not uses_one_rank(extra, 3)
    assert uses_one_rank(create("single"), 3)
    assert isinstance(beside, LimitsRanks)
    assert isinstance(extra, LimitsRanks)
    beside.check_ranks(2)
    with pytest.raises(UsageError, match="servers=2 with 1 ranks is more than one server per rank"):
        beside.check_ranks(1)
    extra.check_ranks(3)
    with pytest.raises(UsageError, match="servers=2 with 2 ranks leaves no rank to train"):
        extra.check_ranks(2)


def test_only_synchronous_servers_support_clipping() -> None:
    clipped = RunConfig(clip_norm=1.0)
    check_strategy(clipped, create("parameter_server"), ranks=2)
    with pytest.raises(UsageError, match="does not support --clip-norm in asynchronous mode"):
        check_strategy(clipped, create(ASYNCHRONOUS), ranks=2)


def test_only_synchronous_training_is_lossless() -> None:
    synchronous, asynchronous = create("parameter_server"), create(ASYNCHRONOUS)
    assert synchronous.lossless
    assert synchronous.lockstep
    assert not asynchronous.lossless
    assert not asynchronous.lockstep


def sgd(parameters: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def train_by_tickets(sync: Sync, total: int, slow_rank: int, pause_s: float) -> list[int]:
    """Train the shares of this rank's tickets, with a pause in each step on the slow rank; return the tickets."""
    tickets = []
    while (ticket := sync.ticket) < total:
        torch.manual_seed(ticket)
        sync.model(torch.randn(4, 6)).square().mean().backward()
        if sync.rank == slow_rank:
            time.sleep(pause_s)
        sync.step()
        tickets.append(ticket)
    return tickets


PAUSE_S = 0.5


def metrics_of(sync: Sync) -> dict[str, Any]:
    assert isinstance(sync.strategy, ReportsMetrics)
    return sync.strategy.metrics()


def train_asynchronously(comm: Comm, options: str) -> dict[str, Any]:
    """Train with one slow rank; return the tickets, weights, optimiser state and staleness of this rank."""
    model = make_model()
    sync = Sync(model, sgd, create(f"{ASYNCHRONOUS}{options}"), comm, "broadcast")
    before_s = time.perf_counter()
    tickets = train_by_tickets(sync, 60, slow_rank=1, pause_s=PAUSE_S)
    took_s = time.perf_counter() - before_s
    sync.strategy.finish()
    found = {"tickets": tickets, "weights": weights(model), "took_s": took_s, **metrics_of(sync)}
    state = sync.strategy.state().copy()
    found["kept"] = sorted(name for name, values in state.optimizer.items() if "momentum_buffer" in values)
    for parameter in model.parameters():
        parameter.data.zero_()
    sync.strategy.load(state)
    found["loaded"] = weights(model)
    with sync.agreed():
        found["agreed"] = weights(model)
    sync.close()
    return found


@pytest.mark.parametrize("options", ["", ",servers=2,max_staleness=2,over_limit=drop"])
def test_no_worker_waits_for_another(pool: Pool, options: str) -> None:
    """A slow worker trains fewer shares, the others more, and every share is trained once."""
    ranks = pool.run(train_asynchronously, 3, options)
    counts = [len(rank["tickets"]) for rank in ranks]
    assert sorted(ticket for rank in ranks for ticket in rank["tickets"]) == list(range(60))
    assert all(rank["tickets"] == sorted(rank["tickets"]) for rank in ranks)
    assert counts[1] < 10, "the slow worker slept most of the time"
    assert ranks[1]["took_s"] >= PAUSE_S * counts[1]
    staleness = ranks[0]["staleness"]
    servers = 2 if "servers" in options else 1
    assert all(rank["staleness"] == staleness for rank in ranks)
    assert staleness.gradients == 60 * servers == sum(count for _, count in staleness.counts)
    assert staleness.max > 5, "gradients of the slow worker are stale"
    assert staleness.max_allowed == (2 if options else 12)
    assert (staleness.dropped > 0) == bool(options)
    for rank in ranks:
        for stage in ("weights", "loaded", "agreed"):
            assert torch.equal(rank[stage], ranks[0]["weights"]), stage
        assert rank["kept"] == ["0.bias", "0.weight", "2.bias", "2.weight"]


def on_extra_ranks(comm: Comm, text: str, servers: int, play: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function on all ranks of the pool, the last ones as servers."""
    close_comm(comm)
    ranks = dist.get_world_size()
    parts = range(ranks - servers), range(ranks - servers, ranks)
    own = open_comm(parts[0], servers=parts[1], device=comm.device, backend="gloo", timeout_s=30)
    assert own is not None
    found = play(own, create(text), *arguments)
    close_comm(own)
    return found


def prove_extra(comm: Comm, text: str, servers: int, case: str, settings: dict[str, Any]) -> Any:
    return on_extra_ranks(comm, text, servers, _prove, case, settings)


def _prove(comm: Comm, strategy: Any, case: str, settings: dict[str, Any]) -> float | None:
    if comm.is_server:
        serve_proof(strategy, cases.make(case), comm)
        return None
    config = RunConfig(**{"batch": 13, "precision": "fp64", "augment": False} | settings)
    share = Share(comm.rank, comm.world_size, config.accumulate, comm.device, torch.float64)
    return prove(strategy, cases.make(case), share, config, comm).error


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    ("case", "settings"), [("cnn", {"accumulate": 2, "clip_norm": 0.01}), ("tied", {}), ("small_bn", {"bn": "sync"})]
)
def test_servers_on_separate_ranks_step_with_the_mean_gradient(
    pool: Pool, servers: int, case: str, settings: dict[str, Any]
) -> None:
    found = pool.run(prove_extra, 4, f"parameter_server:extra=true,servers={servers}", servers, case, settings)
    assert found[4 - servers :] == [None] * servers
    assert all(error < 1e-10 for error in found[: 4 - servers])


def train_extra(comm: Comm, text: str, servers: int) -> Any:
    return on_extra_ranks(comm, text, servers, _train)


def _train(comm: Comm, strategy: Any) -> Any:
    """Train three steps, save, train three steps with other settings; then load and repeat the three steps."""
    model = make_model()
    if comm.is_server:
        strategy.attach(model, sgd, comm)
        assert isinstance(strategy, ServesParameters)
        strategy.serve()
        strategy.close()
        return None
    sync = Sync(model, sgd, strategy, comm, "broadcast")
    _three_steps(sync, 0)
    state = sync.strategy.state().copy()
    saved, ends = weights(model), []
    for _ in range(2):
        sync.optimizer.param_groups[0].update(OTHER_SETTINGS)
        _three_steps(sync, 3)
        sync.strategy.finish()
        ends.append(weights(model))
        assert not torch.equal(weights(model), saved)
        sync.strategy.load(state)
        sync.strategy.finish()
        assert torch.equal(weights(model), saved), "the servers' weights, if asynchronous"
    sync.detach()
    return ends


def _three_steps(sync: Sync, first: int) -> None:
    for step in range(first, first + 3):
        torch.manual_seed(10 * step + sync.rank)
        sync.model(torch.randn(4, 6)).square().mean().backward()
        sync.step()


def reference(comm: Comm) -> Tensor:
    model = make_model()
    with Sync(model, sgd, create("allreduce"), comm, "broadcast") as sync:
        _three_steps(sync, 0)
        sync.optimizer.param_groups[0].update(OTHER_SETTINGS)
        _three_steps(sync, 3)
    return weights(model)


@pytest.mark.parametrize("servers", [1, 2])
def test_servers_on_separate_ranks_follow_settings_and_keep_state(pool: Pool, servers: int) -> None:
    right = pool.run(reference, 4 - servers)[0]
    found = pool.run(train_extra, 4, f"parameter_server:extra=true,servers={servers}", servers)
    for straight, again in found[: 4 - servers]:
        torch.testing.assert_close(straight, right)
        torch.testing.assert_close(again, right)


def test_asynchronous_servers_on_separate_ranks(pool: Pool) -> None:
    found = pool.run(train_extra, 4, f"{ASYNCHRONOUS},extra=true,servers=2", 2)
    for first, second in zip(*found[:2], strict=True):
        assert torch.equal(first, second), "all workers have the same weights, before and after the load"


def adam(parameters: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def under_one_cycle(comm: Comm, text: str, make: Callable[..., torch.optim.Optimizer]) -> Tensor:
    """Train with a scheduler that changes the learning rate and the momentum, or Adam's first beta, in each step."""
    model = make_model()
    with Sync(model, make, create(text), comm, "local") as sync:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(sync.optimizer, max_lr=0.2, total_steps=7)
        for step in range(6):
            torch.manual_seed(step)
            sync.model(torch.randn(4, 6)).square().mean().backward()
            sync.step()
            scheduler.step()
        sync.strategy.finish()
    return weights(model)


@pytest.mark.parametrize("make", [sgd, adam])
def test_asynchronous_servers_follow_a_scheduler(pool: Pool, make: Callable[..., torch.optim.Optimizer]) -> None:
    """A single asynchronous worker trains as with any other strategy."""
    (right,), (found,) = (pool.run(under_one_cycle, 1, text, make) for text in ("allreduce", ASYNCHRONOUS))
    assert torch.equal(found, right)


class Breaking(torch.optim.SGD):
    """Optimiser that fails in its third step."""

    calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if any(p.grad is not None for group in self.param_groups for p in group["params"]):
            self.calls += 1
            if self.calls > 2:
                raise ValueError("the third step is too many")
        super().step(closure)


def with_a_server_that_fails(comm: Comm) -> tuple[str, bool]:
    """Return the error of this rank, and whether it reports the loss of a peer."""
    try:
        with Sync(make_model(), lambda named: Breaking(named, lr=0.1), create(ASYNCHRONOUS), comm, "local") as sync:
            train_by_tickets(sync, 10**6, slow_rank=2, pause_s=0.01)
    except ValueError as error:
        return str(error), False
    except RankError as error:
        return error.message, error.peer_lost
    return "nothing", False


def test_workers_receive_the_failure_of_a_server(pool: Pool) -> None:
    found = pool.run(with_a_server_that_fails, 3)
    assert found[0] == ("the third step is too many", False)
    assert found[1:] == [("the server on rank 0 has failed: ValueError: the third step is too many", False)] * 2


def with_a_worker_that_fails(comm: Comm) -> str:
    try:
        with Sync(make_model(), sgd, create(f"{ASYNCHRONOUS},servers=2"), comm, "local") as sync:
            if comm.rank == 1:
                raise RuntimeError("worker 1 fails")
            train_by_tickets(sync, 10**6, slow_rank=2, pause_s=0.01)
    except (RankError, RuntimeError) as error:
        return str(error)
    return "nothing"


def test_workers_receive_the_failure_of_another_worker(pool: Pool) -> None:
    before_s = time.perf_counter()
    found = pool.run(with_a_worker_that_fails, 3)
    assert found[1] == "worker 1 fails"
    assert all(
        re.fullmatch(r"the server on rank [01] has failed: the worker on its rank has failed\.", found[rank])
        for rank in (0, 2)
    )
    assert time.perf_counter() - before_s < 0.9 * GROUP_TIMEOUT_S, "no worker waits for a time-out"


def clip_asynchronously(comm: Comm) -> str:
    with Sync(make_model(), sgd, create(ASYNCHRONOUS), comm, "local") as sync:
        sync.model(torch.randn(4, 6)).sum().backward()
        try:
            sync.step(max_norm=1.0)
        except UsageError as error:
            return error.message
    return "nothing"


def test_clipping_is_refused_in_a_user_loop(pool: Pool) -> None:
    assert "cannot clip" in pool.run(clip_asynchronously, 1)[0]


def two_tensors(comm: Comm, text: str, max_norm: float | None) -> Tensor:
    return _two_tensors(comm, create(text), max_norm)


def two_tensors_extra(comm: Comm, text: str, max_norm: float | None) -> Any:
    return on_extra_ranks(comm, text, 3, _two_tensors, max_norm)


def _two_tensors(comm: Comm, strategy: Strategy, max_norm: float | None) -> Tensor:
    """Train a model of two tensors; every other step does not use the second; rank 0's gradients have a graph."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1, dtype=torch.float64)
    strategy.allow_unused = True
    if comm.is_server:
        strategy.attach(model, sgd, comm)
        assert isinstance(strategy, ServesParameters)
        strategy.serve()
        strategy.close()
        return torch.empty(0)
    sync = Sync(model, sgd, strategy, comm, "local")
    for step in range(4):
        torch.manual_seed(10 * step + comm.rank)
        x = torch.randn(4, 6, dtype=torch.float64)
        with warnings.catch_warnings(action="ignore"):  # Torch warns that such a graph may leak memory.
            (sync.model(x) if step % 2 else x @ model.weight.T).sum().backward(create_graph=comm.rank == 0)
        sync.step(max_norm)
    sync.strategy.load(sync.strategy.state())
    with sync.agreed():
        found = weights(model)
    sync.detach()
    return found


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_there_may_be_more_servers_than_tensors(pool: Pool, max_norm: float | None) -> None:
    """Some servers then keep no tensor, or only tensors that a step does not use."""
    right = pool.run(two_tensors, 4, "allreduce", max_norm)
    found = pool.run(two_tensors, 4, "parameter_server:servers=4", max_norm)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)
    (right_alone,) = pool.run(two_tensors, 1, "allreduce", max_norm)
    extra = pool.run(two_tensors_extra, 4, "parameter_server:servers=3,extra=true", max_norm)
    torch.testing.assert_close(extra[0], right_alone)
    if max_norm is None:
        asynchronous = pool.run(two_tensors, 4, f"{ASYNCHRONOUS},servers=4", max_norm)
        assert all(torch.equal(rank, asynchronous[0]) for rank in asynchronous)
        assert not torch.equal(asynchronous[0], right[0])
        extra = pool.run(two_tensors_extra, 4, f"{ASYNCHRONOUS},servers=3,extra=true", max_norm)
        torch.testing.assert_close(extra[0], right_alone)


def close_while_another_trains(comm: Comm, timeout_s: float, pause_s: float, steps: int) -> tuple[float, str]:
    """Close rank 0 at once while rank 1 makes slow steps; return the seconds that closing took, and the error."""
    close_comm(comm)
    ours = open_comm(range(2), device=comm.device, backend="gloo", timeout_s=timeout_s)
    if ours is None:
        return 0.0, ""
    sync, message = Sync(make_model(), sgd, create(ASYNCHRONOUS), ours, "local"), "nothing"
    began_s = time.perf_counter()
    try:
        for _ in range(steps if ours.rank else 0):
            time.sleep(pause_s)
            sync.model(torch.randn(4, 6)).sum().backward()
            sync.step()
        sync.detach()
    except RankError as error:
        message = error.message
        sync.strategy.abandon()
    took_s = time.perf_counter() - began_s
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("paceline-server")]
    close_comm(ours)
    return took_s, message


def test_a_server_serves_until_all_workers_leave(pool: Pool) -> None:
    """More than a second longer than the time-out, in steps that leave a busy machine more than a second each."""
    (waited_s, first), (_, second), *_ = pool.run(close_while_another_trains, 4, 2.0, 0.75, 5)
    assert waited_s > 3.0
    assert (first, second) == ("nothing", "nothing")


def test_a_server_raises_if_a_worker_sends_no_request(pool: Pool) -> None:
    (waited_s, first), (stayed_s, second), *_ = pool.run(close_while_another_trains, 4, 1.0, 4.0, 1)
    assert 1.0 < waited_s < stayed_s
    assert first == "rank 1 sent no request for 1 s and has not left the server."
    assert second.startswith("the connection to rank 0 failed or timed out")


class Branching(nn.Module):
    """Model with one layer that only rank 0 uses, and one that no rank uses."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(6, 3) for _ in range(3))
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        """Apply one or two layers."""
        return self.always(x) + self.sometimes(x) if self.used else self.always(x)


def with_unused(comm: Comm) -> list[bool]:
    """Return whether the weights of each layer have changed."""
    torch.manual_seed(0)
    model = Branching(used=comm.rank == 0)
    before = [layer.weight.detach().clone() for layer in (model.always, model.sometimes, model.never)]
    with Sync(model, sgd, create(ASYNCHRONOUS, allow_unused=True), comm, "local") as sync:
        _three_steps(sync, 0)
        sync.strategy.finish()
    after = (model.always, model.sometimes, model.never)
    return [not torch.equal(layer.weight, old) for layer, old in zip(after, before, strict=True)]


def test_unused_parameters_are_not_stepped(pool: Pool) -> None:
    assert pool.run(with_unused, 2) == [[True, True, False]] * 2


def attach_with_synchronised_batchnorm(comm: Comm) -> str:
    try:
        Sync(make_model(), sgd, create(ASYNCHRONOUS), comm, "sync")
    except UsageError as error:
        return error.message
    return "nothing"


def test_synchronised_batchnorm_is_refused(pool: Pool) -> None:
    assert "ranks do not wait for each other" in pool.run(attach_with_synchronised_batchnorm, 2)[0]


def ticket_of(comm: Comm, text: str) -> int | str:
    """Return the first ticket of a rank, or the error message."""
    with Sync(nn.Linear(3, 2), lambda p: torch.optim.SGD(p, lr=0.1), create(text), comm, "local") as sync:
        try:
            return sync.ticket
        except UsageError as error:
            return error.message


@pytest.mark.parametrize("text", ["allreduce", "parameter_server"])
def test_lockstep_strategies_have_no_tickets(pool: Pool, text: str) -> None:
    assert pool.run(ticket_of, 2, text) == [f"{text} has no tickets: all ranks step together."] * 2


def test_each_asynchronous_rank_has_its_own_ticket(pool: Pool) -> None:
    assert pool.run(ticket_of, 2, "parameter_server:asynchronous=true") == [0, 1]
