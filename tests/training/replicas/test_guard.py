"""Tests of the replica guard with real ranks: replicas that differ are found and named, equal ones raise no alarm."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm import Comm
from paceline.errors import ReplicaError
from paceline.records.summary import ReplicaComparisons
from paceline.strategies.allreduce import AllReduce
from paceline.strategies.base.strategy import AfterBackward, Strategy
from paceline.strategies.registry import create
from paceline.training.replicas import guard as replica_guard
from paceline.training.replicas.checksums import checksums
from paceline.training.replicas.distance import TensorDifference, measure_differences
from paceline.training.sync import Sync
from ranks import Pool
from registered import EXCHANGING

FLIPPED_BY_ROUNDING, FLIPPED_MUCH = 0, 22
"""Bits of a float32: the last and the first one of the mantissa."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


class NoChecks(AbstractContextManager[None]):
    """Checks of a training loop that accept everything."""

    def __exit__(self, *_: object) -> None:
        pass

    def agreed(self) -> AbstractContextManager[None]:
        return self

    def close(self) -> None:
        pass


def attach(
    comm: Comm, strategy: Strategy | str = "allreduce", mode: Any = "stop", bn: Any = "local", **changes: Any
) -> Sync:
    model = changes.get("model") or make_model()
    made = create(strategy) if isinstance(strategy, str) else strategy
    sync = Sync(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), made, comm, bn)
    sync.guard_replicas(mode)
    sync._checks.close()  # They would refuse misuse of the loop before the guard can find its effect.
    sync._checks = NoChecks()  # type: ignore[assignment]
    torch.manual_seed(comm.rank)
    return sync


def backward(sync: Sync, model: nn.Module | None = None) -> None:
    F.cross_entropy((model or sync.model)(torch.randn(8, 6)), torch.randint(0, 3, (8,))).backward()


def train(sync: Sync, steps: int) -> None:
    for _ in range(steps):
        backward(sync)
        sync.step()


def found(comm: Comm, name: str) -> str:
    """Return the message of the error that a misuse raises, and its hint."""
    try:
        MISUSES[name](comm)
    except ReplicaError as error:
        return f"{error.message} hint: {error.hint}"
    return ""


# Misuses that make replicas drift.


def unfreeze_later(comm: Comm) -> None:
    model = make_model()
    model[0].weight.requires_grad_(False)
    sync = attach(comm, model=model)
    train(sync, 2)
    model[0].weight.requires_grad_(True)
    sync.optimizer.add_param_group({"params": [("0.weight", model[0].weight)]})
    train(sync, 2)


class PlainDdp(Strategy):
    """DistributedDataParallel, which averages only gradients that come from the wrapped model."""

    name: ClassVar[str] = "plain_ddp"

    def wrap(self, model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, process_group=self.comm.group)

    def step(self, max_norm: float | None = None, scaler: Any = None) -> None:
        self.update(max_norm, scaler)


def call_the_bare_model(comm: Comm) -> None:
    sync = attach(comm, PlainDdp())
    for _ in range(2):
        backward(sync, sync.strategy.model)
        sync.step()


def step_the_optimizer(comm: Comm) -> None:
    sync = attach(comm)
    train(sync, 2)
    for _ in range(4):
        backward(sync)
        sync.optimizer.step()
        sync.optimizer.zero_grad()
    with sync.agreed():
        pass


def step_the_optimizer_on_one_rank(comm: Comm) -> None:
    sync = attach(comm)
    train(sync, 3)
    backward(sync)
    if sync.rank == 1:
        sync.optimizer.step()
    sync.step()


def flip_and_close(comm: Comm) -> None:
    sync = attach(comm)
    train(sync, 5)
    flip_on_rank_1(sync, FLIPPED_MUCH)
    sync.close()


def change_the_model_of_a_rank(comm: Comm) -> None:
    sync = attach(comm)
    if sync.rank == 1:
        sync.strategy.model.append(nn.Linear(3, 3))
    train(sync, 1)


class Silent(AfterBackward):
    """Exchanges nothing, although it promises equal replicas."""

    name: ClassVar[str] = "silent"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        """Leave every gradient as it is."""


class EveryFourth(AllReduce):
    """Averages the weights after every fourth step."""

    name: ClassVar[str] = "every_fourth"
    lossless = False
    period = 4

    def step(self, max_norm: float | None = None, scaler: Any = None) -> None:
        """Step alone, and average in time."""
        self.steps = getattr(self, "steps", 0) + 1
        self.update(max_norm, scaler)
        if self.steps % 4 == 0:
            self.agree([parameter.detach().view(-1) for _, parameter in self.parameters])

    @contextmanager
    def agreed(self) -> Iterator[nn.Module]:
        """Average without keeping it."""
        own = [parameter.detach().clone() for _, parameter in self.parameters]
        self.agree([parameter.detach().view(-1) for _, parameter in self.parameters])
        yield self.model
        for (_, parameter), before in zip(self.parameters, own, strict=True):
            parameter.detach().copy_(before)


def own_strategy(comm: Comm) -> None:
    train(attach(comm, Silent()), 1)


def flip_on_rank_1(sync: Sync, bit: int) -> None:
    if sync.rank == 1:
        sync.strategy.model[0].weight.detach().view(-1).view(torch.int32)[5] ^= 1 << bit


def flip_a_statistic(comm: Comm) -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    sync = attach(comm, bn="sync", model=model)
    train(sync, 2)
    if sync.rank == 1:
        model[1].running_mean += 1
    train(sync, 2)


MISUSES: dict[str, Callable[[Comm], None]] = {
    one.__name__: one
    for one in (
        *(unfreeze_later, call_the_bare_model, step_the_optimizer, step_the_optimizer_on_one_rank, flip_and_close),
        *(change_the_model_of_a_rank, own_strategy, flip_a_statistic),
    )
}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unfreeze_later", "replicas differ after step 4: 0.weight, by up to"),
        ("call_the_bare_model", "no earlier check found them equal"),
        ("step_the_optimizer", "replicas differ after step 2: "),
        (
            "step_the_optimizer_on_one_rank",
            "they were equal after step 2. hint: train through sync.model",
        ),
        ("flip_and_close", "replicas differ after step 5: 0.weight, by up to"),
        (
            "change_the_model_of_a_rank",
            "the model is not the same on all ranks: 3.weight exists on rank 1, but not on rank 0.",
        ),
        ("own_strategy", " and 3 other tensors, by up to"),
        ("flip_a_statistic", "replicas differ after step 4: 1.running_mean"),
    ],
)
def test_replicas_that_drift_stop_the_run_on_all_ranks(pool: Pool, name: str, message: str) -> None:
    first, second = pool.run(found, 2, name)
    assert first == second
    assert message in first
    if "replicas differ" in first:
        assert "of the norm (ranks 0 and 1)" in first


def test_the_error_names_the_last_step_with_equal_replicas(pool: Pool) -> None:
    assert "they were equal after step 2." in pool.run(found, 2, "unfreeze_later")[0]


def flip_on_one_of_three(comm: Comm, bit: int, mode: str) -> tuple[ReplicaComparisons | None, list[str]]:
    sync = attach(comm, mode=mode)
    train(sync, 2)
    flip_on_rank_1(sync, bit)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(sync, 14)
        with sync.agreed():
            result = None if sync.guard is None else sync.guard.result(1.0)
        sync.close()
    return result, [str(one.message) for one in caught]


def test_one_flipped_bit_is_rounding_and_noted_once(pool: Pool) -> None:
    ranks = pool.run(flip_on_one_of_three, 3, FLIPPED_BY_ROUNDING, "stop")
    for rank, (result, caught) in enumerate(ranks):
        assert result is not None
        assert result.difference is not None
        assert result.difference.by_rounding
        assert (result.difference.tensor, result.difference.ranks) == ("0.weight", [1])
        assert result.difference.last_equal_step == 2
        assert 0 < (result.difference.distance or math.inf) < 1e-6
        assert len(caught) == (1 if rank == 0 else 0)
    assert "replicas differ by rounding, found after step 4: 0.weight" in ranks[0][1][0]


def test_warn_trains_on(pool: Pool) -> None:
    (result, caught), *_ = pool.run(flip_on_one_of_three, 3, FLIPPED_MUCH, "warn")
    assert result is not None
    assert result.difference is not None
    assert not result.difference.by_rounding
    assert len(caught) == 1
    assert "replicas differ after step 4" in caught[0]


def test_off_compares_nothing(pool: Pool) -> None:
    assert pool.run(flip_on_one_of_three, 3, FLIPPED_MUCH, "off") == [(None, [])] * 3


# Replicas that are equal.


def train_rightly(comm: Comm, strategy: str, bn: str, steps: int) -> ReplicaComparisons:
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    sync = attach(comm, EveryFourth() if strategy == "every_fourth" else strategy, model=model, bn=bn)
    train(sync, steps)
    with sync.agreed():
        pass
    assert sync.guard is not None
    result = sync.guard.result(1.0)
    sync.close()
    return result


def strategies_and_modes() -> Iterator[Any]:
    """Yield each strategy with one BatchNorm mode in turn; the soak has the other."""
    strategies = [*EXCHANGING, "parameter_server:servers=2", "priority:slice_mb=0.0001", "every_fourth"]
    for number, strategy in enumerate(strategies):
        for place, (bn, ranks) in enumerate([("broadcast", 3), ("sync", 2)]):
            yield pytest.param(strategy, bn, ranks, marks=() if place == number % 2 else pytest.mark.soak)


@pytest.mark.parametrize(("strategy", "bn", "ranks"), list(strategies_and_modes()))
def test_no_false_alarm(pool: Pool, strategy: str, bn: str, ranks: int) -> None:
    for result in pool.run(train_rightly, ranks, strategy, bn, 9):
        assert result.difference is None, "bit by bit"
        assert result.checks >= (3 if strategy == "every_fourth" else 5)


def train_asynchronously(comm: Comm, wrong: bool) -> str:
    sync = attach(comm, "parameter_server:asynchronous=true")
    train(sync, 3 + comm.rank)
    if wrong and comm.rank == 1:
        with torch.no_grad():
            sync.strategy.finish_before = sync.strategy.finish  # type: ignore[attr-defined]
            sync.strategy.finish = lambda: (sync.strategy.finish_before(), make_zero(sync))  # type: ignore
    try:
        with sync.agreed():
            pass
    except ReplicaError as error:
        return error.message
    finally:
        sync.strategy.close()
    return ""


def make_zero(sync: Sync) -> None:
    sync.strategy.model[0].bias.detach().zero_()


@pytest.mark.parametrize("wrong", [False, True])
def test_asynchronous_replicas_are_compared_in_agreed(pool: Pool, wrong: bool) -> None:
    for message in pool.run(train_asynchronously, 2, wrong):
        assert ("0.bias" in message) == wrong


def guards(comm: Comm, strategy: str) -> bool:
    sync = attach(comm, strategy)
    guarded = sync.guard is not None
    train(sync, 2)
    sync.close()
    return guarded


def test_only_replicas_that_should_be_equal_are_guarded(pool: Pool) -> None:
    assert pool.run(guards, 2, "none") == [False, False]
    assert pool.run(guards, 1, "allreduce") == [False]
    assert pool.run(guards, 2, "allreduce") == [True, True]


def odd_weights(comm: Comm) -> ReplicaComparisons:
    """Train weights of many kinds: NaN on all ranks, no items, complex, tied, channels-last, half precision."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.tied = nn.Linear(6, 6)
            self.tied.weight = self.linear.weight
            self.frozen = nn.ParameterList(
                nn.Parameter(tensor, requires_grad=False)
                for tensor in (
                    torch.full((3,), math.nan),
                    torch.zeros(0, 4),
                    torch.randn(3, dtype=torch.complex64),
                    torch.randn(4).to(torch.bfloat16),
                    torch.arange(3),
                    torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
                    torch.randn(4, 4)[:, :2],
                )
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.tied(self.linear(x))

    sync = attach(comm, "allreduce", model=Odd())
    train_on = [torch.randn(4, 6) for _ in range(3)]
    for x in train_on:
        sync.model(x).square().mean().backward()
        sync.step()
    for parameter in sync.strategy.model.parameters():
        if parameter.is_floating_point():
            parameter.detach().fill_(math.nan)
    sync.model(train_on[0]).square().mean().backward()
    sync.step()
    assert sync.guard is not None
    assert "tied.weight" not in sync.guard._last_equal
    result = sync.guard.result(1.0)
    sync.close()
    return result


def test_weights_of_every_kind(pool: Pool) -> None:
    for result in pool.run(odd_weights, 2):
        assert result.difference is None
        assert result.checks == 3


def differences(comm: Comm) -> list[list[TensorDifference]]:
    odd = comm.rank == 2
    kinds = {
        "nan": torch.tensor([math.nan if odd else 1.0, 2.0]),
        "infinite": torch.tensor([math.inf, 2.0]),
        "zero": torch.tensor([-0.0 if odd else 0.0, 1.0]),
        "complex": torch.tensor([1 + 2j, 1 + (1j if odd else 0)]),
        "half": torch.tensor([1.0, 1.5 if odd else 1.0], dtype=torch.bfloat16),
        "all": torch.tensor([float(comm.rank)]),
        "layout": torch.arange(24.0)
        .view(1, 2, 3, 4)
        .to(memory_format=torch.channels_last if odd else torch.contiguous_format),
    }
    return [measure_differences({name: one}, checksums([one]), comm) for name, one in kinds.items()]


def test_distances(pool: Pool) -> None:
    for nan, infinite, zero, complex_, half, everywhere, layout in pool.run(differences, 3):
        assert nan == [TensorDifference("nan", (2,), math.inf)]
        assert infinite == zero == layout == []
        assert complex_ == [TensorDifference("complex", (2,), pytest.approx(1 / math.sqrt(7)))]
        assert half == [TensorDifference("half", (2,), pytest.approx(0.5 / math.sqrt(3.25)))]
        assert everywhere == [TensorDifference("all", (0, 1, 2), 1.0)]


# The steps after which replicas are compared.


class StepClock:
    """Clock for the guard: a reading takes a millisecond, and steps take what the test adds."""

    now = 0.0

    def perf_counter(self) -> float:
        """Return the time."""
        self.now += 0.001
        return self.now


CHECK_S, STEP_S = 0.003, 0.1
"""Time of a comparison in a user's loop by that clock, and of a step."""


def steps_compared(comm: Comm, strategy: str, steps: int, share: float) -> tuple[list[int], list[int], float]:
    """Return the steps of a user's loop with a comparison, the numbers of tensors in each, and their total time."""
    clock, compared, sizes = StepClock(), list[int](), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_guard, "time", clock)
        patch.setattr(replica_guard, "COST_SHARE", share)
        patch.setattr(replica_guard, "TURN_BYTES", 100)
        sync = attach(comm, EveryFourth() if strategy == "every_fourth" else strategy)
        assert sync.guard is not None
        take = sync.guard._take

        def count(tensors: dict[str, Tensor], limit_bytes: float) -> Any:
            taken = take(tensors, limit_bytes)
            sizes.append(len(taken))
            return taken

        patch.setattr(sync.guard, "_take", count)
        for step in range(1, steps + 1):
            clock.now += STEP_S
            checks = sync.guard._checks
            train(sync, 1)
            compared += [step] if sync.guard._checks > checks else []
        cost_s = sync.guard.result(1.0).seconds
        sync.close()
    return compared, sizes[: len(compared)], cost_s


def test_powers_of_two_come_first(pool: Pool) -> None:
    first, second = pool.run(steps_compared, 2, "allreduce", 20, 1e-9)
    assert first == second
    assert first == ([1, 2, 4, 8, 16], [4] * 5, pytest.approx(5 * CHECK_S))


def test_the_periods_of_a_strategy_are_kept(pool: Pool) -> None:
    first, second = pool.run(steps_compared, 2, "every_fourth", 20, 1e-9)
    assert first == second
    assert first[0] == [4, 8, 16]


def test_as_often_as_the_cost_allows_some_tensors_each_time(pool: Pool) -> None:
    first, second = pool.run(steps_compared, 2, "allreduce", 200, 0.01)
    assert first == second, "all ranks decide alike"
    compared, sizes, cost_s = first
    powers = {2**n for n in range(8)}
    assert powers <= set(compared)
    assert len(compared) > 3 * len(powers), "more often than after powers of two"
    assert all(size == 4 for step, size in zip(compared, sizes, strict=True) if step in powers)
    assert min(sizes) < 4, "in turns"
    assert cost_s <= 0.01 * 200 * STEP_S + (len(powers) + 1) * CHECK_S


def windows_compared(comm: Comm, window_s: float) -> list[int]:
    """Return the numbers of tensors that are compared after each of some windows; 0 for none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_guard, "time", StepClock())
        sync = attach(comm)
        assert sync.guard is not None
        sync.guard._by_windows = True
        sizes, take = list[int](), sync.guard._take
        patch.setattr(sync.guard, "_take", lambda *how: (taken := take(*how), sizes.append(len(taken)))[0])
        compared = []
        for end in (5, 6, 7, 9, 10, 11, 12, 13, 14):
            train(sync, 1)
            sync.guard._steps = end
            sizes.clear()
            sync.guard.at_window_end(end * window_s)
            compared.append(sum(sizes))
        sync.close()
    return compared


def test_windows_with_a_power_of_two_end_with_a_comparison(pool: Pool) -> None:
    first, second = pool.run(windows_compared, 2, 0.001)
    assert first == second == [4, 0, 0, 4, 0, 0, 0, 0, 0]


def test_long_windows_all_end_with_a_comparison(pool: Pool) -> None:
    first, second = pool.run(windows_compared, 2, 100.0)
    assert first == second == [4] * 9


def fails_on_rank_1(comm: Comm) -> bool:
    """Return whether the rank has closed while it handled an error. The other rank closes nothing."""
    sync = attach(comm)
    train(sync, 3)
    if comm.rank == 0:
        return False
    try:
        raise ValueError("sample 17 is damaged")
    except ValueError:
        sync.close()  # Waiting for the other rank would end in a warning, which is an error here.
        return True


def test_close_after_an_error_waits_for_nobody(pool: Pool) -> None:
    assert pool.run(fails_on_rank_1, 2) == [False, True]


def closes_after_a_caught_error(comm: Comm) -> bool:
    """Call `close` when the error that has left the `with` block is no longer handled."""
    sync = attach(comm)

    def fail() -> None:
        with sync:
            train(sync, 3)
            raise ValueError("sample 17 is damaged")

    with pytest.raises(ValueError, match="sample 17"):
        fail()
    sync.close()
    return sync.guard is None


def test_close_after_an_error_that_was_caught_compares_nothing(pool: Pool) -> None:
    assert pool.run(closes_after_a_caught_error, 2) == [True, True]


def close_with(comm: Comm, message: str) -> list[str]:
    """Close while the last comparison fails; return the error or the warnings."""
    sync = attach(comm)
    assert sync.guard is not None

    def fail() -> None:
        raise RuntimeError(message)

    sync.guard.at_end = fail  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            sync.close()
        except RuntimeError as error:
            return [str(error)]
    return [str(one.message) for one in caught]


def test_only_a_lost_rank_may_leave_the_last_comparison_out(pool: Pool) -> None:
    assert pool.run(close_with, 2, "CUDA error: out of memory") == [["CUDA error: out of memory"]] * 2
    for (warning,) in pool.run(close_with, 2, "Connection closed by peer [127.0.0.1]"):
        assert warning.startswith("replicas were not compared in close(), since another rank is gone: Connection")
