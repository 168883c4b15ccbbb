"""Tests of the learning rate: schedules against their formulas, warm-up, and that it reaches every strategy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from paceline.analysis.curves import learning_rate_curve
from paceline.comm import Comm, World
from paceline.config import RunConfig
from paceline.config.recipe import Recipe, override
from paceline.errors import WorkloadError
from paceline.records import RunFolder, RunRecord, read_run
from paceline.records.events import LogEvent
from paceline.training.learning_rate import RecipeRate, SchedulerRate, learning_rate_factor, make_learning_rate
from paceline.training.optimizers.make import make_optimizer
from paceline.training.run import run
from paceline.workloads.batches import Share, make_source
from paceline.workloads.workload import Workload
from ranks import SIZE, Pool
from registered import LOSSLESS, one_of_each_family

pytestmark = pytest.mark.takes(20)

HERE = __name__
STEPS = 12


def factors(recipe: Recipe, steps: int | None, per_epoch: float = 10, count: int | None = None) -> list[float]:
    return [learning_rate_factor(recipe, step, steps, per_epoch) for step in range(count or steps or 0)]


def test_without_a_schedule_it_is_constant() -> None:
    assert factors(Recipe(), 20) == [1.0] * 20
    assert factors(Recipe(), None, count=5) == [1.0] * 5


def test_a_triangle_rises_in_the_warm_up_and_falls_to_zero() -> None:
    found = factors(Recipe(schedule="triangular", warmup_epochs=1), 40)
    assert found[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert found[10] == 1
    assert found[10:] == pytest.approx([1 - step / 30 for step in range(30)])


def test_a_cosine_falls_from_its_peak_to_nearly_zero() -> None:
    found = factors(Recipe(schedule="cosine"), 50)
    assert found == pytest.approx([(1 + math.cos(math.pi * step / 50)) / 2 for step in range(50)])


def test_steps_divide_by_ten_at_half_and_three_quarters() -> None:
    found = factors(Recipe(schedule="step"), 40)
    assert found == pytest.approx([1.0] * 20 + [0.1] * 10 + [0.01] * 10)


def test_the_least_number_of_warm_up_steps_applies_to_short_epochs() -> None:
    found = factors(Recipe(warmup_epochs=1, warmup_steps=25), 100)
    assert found[24] == pytest.approx(25 / 26)
    assert found[25] == 1
    assert factors(Recipe(warmup_epochs=4, warmup_steps=25), 100)[39] == pytest.approx(40 / 41)


@pytest.mark.parametrize("schedule", ["constant", "triangular", "cosine", "step"])
def test_a_short_run_rises_no_faster_than_a_long_one(schedule: Any) -> None:
    recipe = Recipe(schedule=schedule, warmup_steps=100)
    long, short = factors(recipe, 1000), factors(recipe, 20)
    assert max(short) == pytest.approx(0.1)
    assert all(own <= 1.1 * other for own, other in zip(short, long, strict=False))


def test_every_parameter_group_keeps_its_share() -> None:
    one, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [one], "lr": 0.4}, {"params": [other], "lr": 0.1}])
    rate = RecipeRate(Recipe(schedule="triangular"), optimizer, 10, lambda _: 10)
    rate.before_step(5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.05]
    rate.before_step(0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.4, 0.1]


def test_a_schedule_needs_an_end() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    workload = Workload(model=nn.Linear(1, 1), train=[], loss=F.mse_loss, recipe=Recipe(schedule="cosine"))
    with pytest.raises(WorkloadError, match="the schedule cosine needs the length of the training data"):
        make_learning_rate(workload, optimizer, None, lambda _: None, total=None, has_end=False)
    make_learning_rate(workload, optimizer, None, lambda _: 10, total=10, has_end=True)


def test_a_schedule_never_goes_back_when_the_estimated_length_grows() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    lengths = iter([10, 10, 10, 40, 40, 8, 8, 100, 100])
    rate = RecipeRate(Recipe(schedule="triangular"), optimizer, 10, lambda _: next(lengths))
    rates = []
    for step in range(9):
        rate.before_step(step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates))
    assert rates[-1] < rates[0]


def test_a_scheduler_is_given_the_length_only_where_it_is_known() -> None:
    given = []

    def make(optimizer: torch.optim.Optimizer, steps: int | None) -> torch.optim.lr_scheduler.LRScheduler:
        given.append(steps)
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    workload = blobs(scheduler=make, recipe=Recipe())
    make_learning_rate(workload, optimizer, 10, lambda step: 2 * (step + 1), total=None, has_end=True)
    make_learning_rate(workload, optimizer, 10, lambda _: 30, total=30, has_end=True)
    assert given == [None, 30]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _, __: None, "scheduler(optimizer, steps) returned a NoneType."),
        (lambda _: None, "scheduler(optimizer, steps) failed: TypeError"),
        (lambda own, steps: torch.optim.lr_scheduler.OneCycleLR(own, 0.1, total_steps=steps), "failed: ValueError"),
    ],
)
def test_a_scheduler_that_cannot_be_made_is_an_error_of_the_workload(make: Any, message: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(WorkloadError) as caught:
        make_learning_rate(
            blobs(scheduler=make, recipe=Recipe()), optimizer, 10, lambda _: None, total=None, has_end=True
        )
    assert message in caught.value.message
    assert "torch.optim.lr_scheduler" in str(caught.value.hint)


def test_a_recipe_of_another_type_is_refused() -> None:
    with pytest.raises(WorkloadError, match="`recipe` is a dict, not a Recipe"):
        blobs(recipe={"lr": 0.1})


# The workload's own scheduler, and real runs.


def blobs(**settings: Any) -> Workload:
    """Return a small classification without BatchNorm, so that all strategies compute the same."""
    torch.manual_seed(3)
    x = torch.randn(96, 6)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return Workload(model=model, train=(x, x.argmax(1) % 3), loss=F.cross_entropy, **settings)


def halved_each_step(optimizer: torch.optim.Optimizer, steps: int | None) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a scheduler that halves the learning rate, and checks the length that it is given."""
    assert steps == STEPS
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def with_scheduler() -> Workload:
    """Return a workload that brings an optimiser and a scheduler."""
    return blobs(scheduler=halved_each_step, optimizer=lambda p: torch.optim.SGD(p, lr=0.4))


def with_recipe() -> Workload:
    """Return a workload that brings a recipe."""
    return blobs(recipe=Recipe(lr=0.5, reference_batch=32, scale_lr="linear", schedule="triangular"))


def test_a_scheduler_counts_steps_that_other_ranks_have_trained() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    rate = SchedulerRate(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), None)
    rate.before_step(0)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 1
    rate.before_step(3)
    assert optimizer.param_groups[0]["lr"] == 0.125


def train(comm: Comm, folder: str, runs: list[tuple[str, str, dict[str, Any]]]) -> None:
    """Train on all ranks of the pool: one run for each workload, strategy and settings."""
    for number, (workload, strategy, settings) in enumerate(runs):
        world = World(
            comm.rank, SIZE, local_rank=comm.rank, local_size=SIZE, interface="lo", ranks_sharing_cores=1,
            store=dist.HashStore(),
        )  # fmt: skip
        config = RunConfig(
            workload=f"{HERE}:{workload}",
            strategy=strategy,
            steps=STEPS,
            batch=48,
            log_every=1,
            events=False,
            **settings,
        )
        run(config, world, RunFolder.create(Path(folder) / str(number)), threads=1)


def trained(pool: Pool, folder: Path, runs: list[tuple[str, str, dict[str, Any]]]) -> list[RunRecord]:
    pool.run(train, SIZE, str(folder), runs)
    return [read_run(folder / str(number)) for number in range(len(runs))]


def losses_of(record: RunRecord) -> list[float]:
    return [loss for event in record.events_of(LogEvent) for loss in event.losses if loss is not None]


def losses_by_hand(workload: Workload, recipe: Recipe, peak: float) -> list[float]:
    """Return the losses of plain training in one process: the same batches, a learning rate by the formula."""
    assert isinstance(workload.train, tuple)
    source = make_source(workload.train, Share(0, 1, 1, torch.device("cpu")), batch=48, seed=0)
    optimizer = make_optimizer(list(workload.model.parameters()), recipe, peak)
    losses: list[float] = []
    batches = (batch for epoch in itertools.count() for batch in source.epoch(epoch))
    for step, (whole,) in zip(range(STEPS), batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = peak * learning_rate_factor(recipe, step, STEPS, 2)
        loss = workload.forward(workload.model, source.fetch(whole)).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_warm_up_and_schedule_reach_every_strategy(pool: Pool, tmp_path: Path) -> None:
    """A server must follow the learning rate too; with another one, losses would differ from the second step on."""
    recipe = Recipe(lr=0.5, schedule="cosine", warmup_epochs=2, nesterov=True, weight_decay=0.01)
    settings = {name: getattr(recipe, name) for name in ("lr", "schedule", "warmup_epochs", "nesterov", "weight_decay")}
    expected = losses_by_hand(blobs(), recipe, 0.5)
    records = trained(pool, tmp_path, [("blobs", strategy, settings) for strategy in LOSSLESS])
    for strategy, record in zip(LOSSLESS, records, strict=True):
        assert losses_of(record) == pytest.approx(expected, rel=1e-4), strategy
        rates = [event.lr for event in record.events_of(LogEvent)]
        assert rates[-1] == pytest.approx(0.5 * learning_rate_factor(recipe, STEPS - 1, STEPS, 2)), strategy


def optimizers_and_strategies() -> Iterator[Any]:
    """Yield each optimiser with one strategy of each family, another with each optimiser, and with all in the soak."""
    for turn, optimizer in enumerate(("adamw", "lars", "lamb", "muon")):
        yield pytest.param(optimizer, one_of_each_family(LOSSLESS, turn), id=optimizer)
        yield pytest.param(optimizer, LOSSLESS, marks=pytest.mark.soak, id=f"{optimizer} with all")


@pytest.mark.parametrize(("optimizer", "strategies"), list(optimizers_and_strategies()))
def test_optimisers_of_recipes_train_alike_under_every_strategy(
    pool: Pool, tmp_path: Path, optimizer: Any, strategies: list[str]
) -> None:
    """Strategies that step in parts, or on servers, must keep layers whole: trust ratios are norms of layers."""
    recipe = override(Recipe(), {"optimizer": optimizer})
    expected = losses_by_hand(blobs(), recipe, recipe.peak_lr(48))
    records = trained(pool, tmp_path, [("blobs", strategy, {"optimizer": optimizer}) for strategy in strategies])
    for strategy, record in zip(strategies, records, strict=True):
        assert losses_of(record) == pytest.approx(expected, rel=2e-3), strategy
        assert losses_of(record)[-1] < losses_of(record)[0], strategy
        assert record.topology.recipe is not None
        assert record.topology.recipe.optimizer == optimizer


def test_a_workload_brings_a_recipe_or_a_scheduler(pool: Pool, tmp_path: Path) -> None:
    runs: list[tuple[str, str, dict[str, Any]]] = [
        ("with_recipe", "ddp", {}),
        ("with_recipe", "ddp", {"lr": 0.25, "schedule": "constant"}),
        ("with_scheduler", "parameter_server", {}),
        ("with_scheduler", "parameter_server:asynchronous=true", {}),
    ]
    own, overridden, scheduled, asynchronous = trained(pool, tmp_path, runs)
    assert own.topology.lr == pytest.approx(0.75)
    assert own.config["schedule"] == "triangular"
    assert own.events_of(LogEvent)[-1].lr == pytest.approx(0.75 / STEPS)
    assert (overridden.topology.lr, overridden.events_of(LogEvent)[-1].lr) == (0.25, 0.25)
    assert scheduled.events_of(LogEvent)[-1].lr == pytest.approx(0.4 / 2 ** (STEPS - 1))
    assert asynchronous.events_of(LogEvent)[-1].lr == pytest.approx(0.4 / 2 ** (STEPS - 1))
    assert scheduled.topology.recipe is not None
    assert (scheduled.topology.lr, scheduled.topology.recipe.schedule) == (None, "")


@pytest.mark.parametrize("slow_rank", ["", "0:8"])
def test_the_learning_rate_of_every_step_is_known_if_ranks_do_not_step_together(
    pool: Pool, tmp_path: Path, slow_rank: str
) -> None:
    """Steps are counted over all ranks; a slow rank trains none of the shares of some steps."""
    recipe = Recipe(lr=0.5, schedule="cosine", warmup_epochs=2)
    settings = {name: getattr(recipe, name) for name in ("lr", "schedule", "warmup_epochs")}
    strategy = "parameter_server:asynchronous=true"
    (record,) = trained(pool, tmp_path, [("blobs", strategy, {**settings, "slow_rank": slow_rank})])
    curve = learning_rate_curve(record)
    assert curve.steps == list(range(STEPS))
    assert curve.rates == pytest.approx([0.5 * factor for factor in factors(recipe, STEPS, 2)])


def test_a_run_that_ends_by_time_still_follows_its_schedule(pool: Pool, tmp_path: Path) -> None:
    (record,) = trained(pool, tmp_path, [("blobs", "ddp", {"schedule": "triangular", "seconds": 60.0})])
    rates = [event.lr for event in record.events_of(LogEvent) if event.lr is not None]
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates))
    assert rates[-1] < rates[0]
