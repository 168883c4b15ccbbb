"""Loss scaling on real ranks: equal to one process with the same scaler, and an overflow skips a step everywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

from paceline.comm import Comm, close_comm, open_comm
from paceline.errors import UsageError, WorkloadError
from paceline.measure.steps import AGREE, BACKWARD, FORWARD, OPTIMISER, make_stopwatch
from paceline.strategies.base.scaling import skipped_steps, why_no_scaler
from paceline.strategies.base.strategy import AfterBackward, Strategy
from paceline.strategies.registry import create
from paceline.training.sync import Sync
from ranks import Pool
from registered import LOSSLESS, with_options

pytestmark = pytest.mark.takes(6)

ALL = [
    *with_options(LOSSLESS, {"halving_doubling": "segment_kb=0.5", "bucketed": "bucket_mb=0.0001"}),
    "ddp:bucket_view=true",
    "ddp:overlap=false",
]
STEPS, OVERFLOWING, MICRO_BATCHES = 6, 3, 2
MAX_NORM = 0.2
"""Below the norm of the gradients of some steps."""


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def loss_of(model: nn.Module, step: int, rank: int, number: int, overflowing: Sequence[int] = ()) -> Tensor:
    """Return the loss of a micro-batch; its scaled gradient overflows on one rank in some steps."""
    torch.manual_seed(1000 * step + 10 * rank + number)
    loss: Tensor = model(torch.randn(4, 6)).square().mean() / MICRO_BATCHES
    overflows = step in overflowing and rank == 1 and number == 0
    return loss * 1e36 if overflows else loss  # Times the scale of 65,536 this is more than float32 can hold.


@dataclass
class Trained:
    """Outcome of a training."""

    weights: list[Tensor]
    """Weights after each step."""
    momentum: list[Tensor]
    """Momentum after each step."""
    scales: list[float]
    skipped: int


def train(
    comm: Comm, text: str, overflowing: Sequence[int], max_norm: float | None = None, scaled: bool = True
) -> Trained:
    """Train under a strategy, with gradient accumulation."""
    model = make_model()
    sync = Sync(model, sgd, create(text), comm, "local")
    scaler = GradScaler("cpu") if scaled else None
    found = Trained([], [], [], 0)
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            with sync.microbatch(last=number == MICRO_BATCHES - 1):
                loss = loss_of(sync.model, step, sync.rank, number, overflowing)
                (loss if scaler is None else scaler.scale(loss)).backward()
        sync.step(max_norm, scaler)
        sync.strategy.finish()
        assert all(parameter.grad is None for parameter in model.parameters())
        found.weights.append(flat(model.parameters()))
        found.momentum.append(flat(momentum_of(sync.optimizer)))
        found.scales.append(1.0 if scaler is None else scaler.get_scale())
    found.skipped = sync.skipped_steps
    assert found.skipped == skipped_steps(scaler)
    sync.close()
    return found


def train_alone(ranks: int, overflowing: Sequence[int], max_norm: float | None) -> Trained:
    """Train in this process on the samples of all ranks, as torch's documentation says."""
    model, found = make_model(), Trained([], [], [], 0)
    optimizer, scaler = sgd(model.parameters()), GradScaler("cpu")
    for step in range(STEPS):
        for rank in range(ranks):
            for number in range(MICRO_BATCHES):
                scaler.scale(loss_of(model, step, rank, number, overflowing) / ranks).backward()
        scaler.unscale_(optimizer)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.weights.append(flat(model.parameters()))
        found.momentum.append(flat(momentum_of(optimizer)))
        found.scales.append(scaler.get_scale())
    return found


def flat(tensors: Any) -> Tensor:
    return torch.cat([torch.empty(0), *[tensor.detach().reshape(-1) for tensor in tensors]])


def momentum_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [values["momentum_buffer"] for values in optimizer.state.values()]


@pytest.mark.parametrize("text", ALL)
def test_an_overflow_on_one_rank_skips_the_step_on_all(pool: Pool, text: str) -> None:
    overflowing = (0, OVERFLOWING)
    alone = train_alone(2, overflowing, MAX_NORM)
    everyone = pool.run(train, 2, text, overflowing, MAX_NORM)
    assert alone.scales == [2.0**15] * OVERFLOWING + [2.0**14] * (STEPS - OVERFLOWING)
    for rank in everyone:
        assert rank.scales == alone.scales
        assert rank.skipped == 2
        assert torch.equal(rank.weights[0], flat(make_model().parameters()))
        for step in range(STEPS):
            torch.testing.assert_close(rank.weights[step], alone.weights[step], rtol=1e-5, atol=1e-7)
            assert torch.equal(rank.weights[step], everyone[0].weights[step])
        assert torch.equal(rank.weights[OVERFLOWING], rank.weights[OVERFLOWING - 1])
        assert not torch.equal(rank.weights[OVERFLOWING + 1], rank.weights[OVERFLOWING])
        if not text.startswith("parameter_server"):  # There, servers keep the momentum.
            assert torch.equal(rank.momentum[OVERFLOWING], rank.momentum[OVERFLOWING - 1])
            torch.testing.assert_close(rank.momentum[-1], alone.momentum[-1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("text", ALL)
def test_without_an_overflow_a_scaler_changes_nothing(pool: Pool, text: str) -> None:
    scaled = pool.run(train, 2, text, ())
    plain = pool.run(train, 2, text, (), None, False)
    for one, other in zip(scaled, plain, strict=True):
        assert one.scales == [2.0**16] * STEPS
        assert one.skipped == 0
        torch.testing.assert_close(one.weights[-1], other.weights[-1], rtol=1e-6, atol=1e-8)


def test_ranks_that_exchange_nothing_decide_each_for_itself(pool: Pool) -> None:
    first, second = pool.run(train, 2, "none", (OVERFLOWING,))
    assert first.scales[-1] == 2.0**16
    assert second.scales[-1] == 2.0**15
    assert (first.skipped, second.skipped) == (0, 1)


def test_one_process_needs_no_agreement(pool: Pool) -> None:
    (alone,) = pool.run(train, 1, "single", ())
    assert alone.scales == [2.0**16] * STEPS


class HidesOverflow(AfterBackward):
    """Strategy whose ranks do not see each other's overflow, as a lossy one may not."""

    name = "hides_overflow"
    lossless = False

    def agree(self, gradients: Sequence[Tensor]) -> None:
        pass


def step_with_scales(comm: Comm, scales: Sequence[float], overflowing: Sequence[int]) -> tuple[float, bool] | str:
    """Train one step; return the scale after it and whether the weights changed, or why it was refused."""
    model, scaler = make_model(), GradScaler("cpu", init_scale=scales[comm.rank])
    sync = Sync(model, sgd, HidesOverflow(), comm, "local")
    before = flat(model.parameters())
    scaler.scale(loss_of(sync.model, 0, sync.rank, 0, overflowing)).backward()
    try:
        sync.step(scaler=scaler)
    except UsageError as error:
        return error.message
    return scaler.get_scale(), not torch.equal(flat(model.parameters()), before)


def test_ranks_agree_on_an_overflow_that_only_one_of_them_sees(pool: Pool) -> None:
    assert pool.run(step_with_scales, 2, [2.0**10] * 2, [0]) == [(2.0**9, False)] * 2


def test_ranks_with_different_scales_are_refused(pool: Pool) -> None:
    message = "the GradScaler's scale is 4 on rank 0 and 8 on rank 1."
    assert pool.run(step_with_scales, 2, [4.0, 8.0], []) == [message] * 2


def phases_of_steps(comm: Comm) -> list[list[int]]:
    """Time an ordinary step and a skipped one; return the phases of each."""
    close_comm(comm)
    stopwatch = make_stopwatch(comm.device, events=True)
    ours = open_comm(
        range(dist.get_world_size()), device=comm.device, backend="gloo", timeout_s=30, stopwatch=stopwatch
    )
    assert ours is not None
    sync, scaler, phases = Sync(make_model(), sgd, create("allreduce"), ours, "local"), GradScaler("cpu"), []
    for step in range(3):
        stopwatch.begin()
        loss = loss_of(sync.model, step, sync.rank, 0, (1,))
        stopwatch.lap(FORWARD)
        scaler.scale(loss).backward()
        stopwatch.lap(BACKWARD)
        sync.step(scaler=scaler)
        stopwatch.lap(OPTIMISER)
        phases.append([phase for phase, *_ in stopwatch.end().ends])
    sync.close()
    return phases


def test_all_of_a_skipped_step_is_synchronisation(pool: Pool) -> None:
    trained, skipped = [FORWARD, BACKWARD, AGREE, OPTIMISER], [FORWARD, BACKWARD, AGREE]
    assert pool.run(phases_of_steps, 4) == [[trained, skipped, trained]] * 4


# Parameters that the optimiser does not have, and uses that are refused.


def train_first_layer(comm: Comm, scaled: bool) -> Tensor:
    """Train only the first layer, with clipping by the norm of all gradients."""
    model, scaler = make_model(), GradScaler("cpu", enabled=scaled)
    with Sync(model, lambda p: sgd([w for _, w in p][:2]), create("allreduce"), comm, "local") as sync:
        for step in range(3):
            scaler.scale(loss_of(sync.model, step, 0, 0)).backward()
            sync.step(max_norm=0.01, scaler=scaler)
    return flat(model.parameters())


def test_clipping_counts_parameters_that_the_optimiser_lacks(pool: Pool) -> None:
    (scaled,), (plain,) = pool.run(train_first_layer, 1, True), pool.run(train_first_layer, 1, False)
    torch.testing.assert_close(scaled, plain, rtol=1e-6, atol=1e-8)
    assert not torch.equal(scaled, flat(make_model().parameters()))


class WithoutScaler(AfterBackward):
    """Strategy with the older signature of `step`."""

    name = "without_scaler"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        pass

    def step(self, max_norm: float | None = None) -> None:  # type: ignore[override]
        super().step(max_norm)


class UpdatesWithoutScaler(AfterBackward):
    """Strategy with the older signature of `update`."""

    name = "updates_without_scaler"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        pass

    def update(self, max_norm: float | None) -> None:  # type: ignore[override]
        super().update(max_norm)


class WithoutSupport(WithoutScaler):
    """Strategy that says that it supports no scaler."""

    name = "without_support"
    supports = frozenset({"clip"})


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (WithoutScaler(), "its method `step` has no `scaler`"),
        (UpdatesWithoutScaler(), "its method `update` has no `scaler`"),
        (WithoutSupport(), "without_support does not support a GradScaler."),
        (create("parameter_server:asynchronous=true"), "in asynchronous mode"),
    ],
    ids=lambda value: value.name if isinstance(value, Strategy) else "",
)
def test_strategies_without_a_scaler(strategy: Strategy, reason: str) -> None:
    assert reason in (why_no_scaler(strategy) or "")


def test_built_in_strategies_support_a_scaler() -> None:
    assert [why_no_scaler(create(name)) for name in (*ALL, "single", "none")] == [None] * (len(ALL) + 2)


def refusals(comm: Comm) -> list[str]:
    """Return the messages for uses that are refused; each is followed by a step that is right."""
    found: list[str] = []

    def attempt(sync: Sync, scaler: Any) -> None:
        try:
            sync.step(scaler=scaler)
        except (UsageError, WorkloadError) as error:
            found.append(error.message if error.hint else "an error without a hint")
        else:
            found.append("")

    def backward(sync: Sync, scaler: GradScaler) -> None:
        sync.optimizer.zero_grad()
        scaler.scale(loss_of(sync.model, 0, 0, 0)).backward()

    def attach(strategy: Strategy | None = None, model: nn.Module | None = None) -> Sync:
        return Sync(model or make_model(), sgd, strategy or create("allreduce"), comm, "local")

    sync, scaler = attach(), GradScaler("cpu")
    attempt(sync, "scaler")
    attempt(sync, scaler)
    backward(sync, scaler)
    scaler.unscale_(sync.optimizer)
    attempt(sync, scaler)
    scaler.update()
    sync.optimizer.zero_grad()
    scaler.scale(loss_of(sync.model, 0, 0, 0) * math.inf).backward()
    scaler.step(sync.optimizer)  # Skips the step of the optimiser, which the loop's checks would refuse.
    attempt(sync, scaler)
    scaler.update()
    other = attach()
    backward(sync, scaler)
    backward(other, scaler)
    attempt(sync, scaler)
    attempt(other, scaler)
    sync.detach()
    attempt(other, scaler)
    backward(other, scaler)
    model = make_model()
    separate = sgd(model.parameters())
    scaler.scale(loss_of(model, 0, 0, 0)).backward()
    scaler.unscale_(separate)
    attempt(other, scaler)
    scaler.update()
    disabled = GradScaler("cpu", enabled=False)
    backward(other, disabled)
    attempt(other, disabled)
    half = attach(model=make_model().bfloat16().half())
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale(half.model(torch.ones(1, 6, dtype=torch.float16)).float().mean()).backward()
    attempt(half, scaler)
    own, scaler = attach(UpdatesWithoutScaler()), GradScaler("cpu")
    backward(own, scaler)
    attempt(own, scaler)
    attempt(own, None)
    return found


def test_misuse_is_refused_in_one_sentence(pool: Pool) -> None:
    assert pool.run(refusals, 1) == [
        [
            "sync.step() got a scaler of type str.",
            "the GradScaler passed to sync.step() has not scaled any loss.",
            "scaler.unscale_() was called before sync.step(scaler=scaler), which unscales by itself.",
            "scaler.step() was called before sync.step(scaler=scaler).",
            "",
            "one GradScaler was passed to two syncs.",
            "",
            "the GradScaler passed to sync.step() is also used for another optimiser.",
            "",
            "the gradient of 0.weight is float16, which a GradScaler cannot unscale.",
            "updates_without_scaler does not support a GradScaler: its method `update` has no `scaler`.",
            "",
        ]
    ]
