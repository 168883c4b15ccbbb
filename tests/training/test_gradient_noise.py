"""Tests of the gradient noise scale, on a problem with a known one: ½|w − x|² with x ~ N(μ, σ²I).

The gradient of a sample is w − x, so the exact gradient is w − μ, and its variance is σ² in each dimension.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from device_operations import without_waiting
from paceline.comm.group import Comm
from paceline.records.events import NoiseFigures
from paceline.strategies.base.scaling import StepSkipper
from paceline.strategies.registry import create
from paceline.training import gradient_noise
from paceline.training.gradient_noise import NoiseShare, figures_of
from paceline.training.sync import Sync
from paceline.workloads.sampler import split
from ranks import Pool
from registered import EXCHANGING

PARTS = (300, 100)
DIMENSIONS = sum(PARTS)
SIGMA, DISTANCE_SQ = 2.0, 4.0
"""Standard deviation of the samples in each dimension, and |w − μ|², with w = 0."""
TRACE = SIGMA**2 * DIMENSIONS
BATCH, STEPS = 10, 40
"""A batch that divides neither over 3 ranks nor over 3 micro-batches."""


class Quadratic(nn.Module):
    """Two parameters, whose loss is the mean of ½|w − x|²; they start at 0, and a learning rate of 0 keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in PARTS)

    def forward(self, x: Tensor) -> Tensor:
        columns = x.split(PARTS, dim=1)
        return sum((part - own).square().sum(1) for part, own in zip(self.parts, columns, strict=True)).mean() / 2


def samples_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    center = math.sqrt(DISTANCE_SQ / DIMENSIONS)
    return center + SIGMA * torch.randn(BATCH, DIMENSIONS, generator=generator, dtype=torch.float64)


def measure(comm: Comm, strategy: str, micro_batches: int, skipped: int = -1) -> tuple[NoiseFigures | None, str | None]:
    """Train with clipping, and return the figures over all steps; a NaN on one rank makes all skip a step."""
    skipper = StepSkipper("cpu") if skipped >= 0 else None
    with Sync(
        Quadratic(), lambda named: torch.optim.SGD([p for _, p in named], lr=0.0), create(strategy), comm, "local"
    ) as sync:
        sync.measure_noise("all", micro_batches)
        own = split(BATCH, comm.world_size)[comm.rank]
        found = []
        for step in range(STEPS + 1):  # The first step is not measured.
            x = samples_of(step)
            sync.noise.begin_step(step)
            parts = [own[part.start : part.stop] for part in split(len(own), micro_batches)]
            for number, part in enumerate(parts, start=1):
                sync.noise.begin_micro_batch(len(part), sync.weight(len(part), BATCH))
                with sync.microbatch(last=number == len(parts)):
                    loss = sync.model(x[part.start : part.stop]) * sync.weight(len(part), BATCH)
                    if step == skipped and comm.rank == 0:
                        loss = loss * math.nan
                    (loss if skipper is None else skipper.scale(loss)).backward()
            with without_waiting():
                sync.noise.end_backward(skipper)
            before = sync.skipped_steps
            sync.step(1e-3, skipper) if skipper is not None else sync.step(1e-3)
            sample = sync.noise.end_step()
            if sample is not None and sync.skipped_steps == before:
                found.append(sample)
        sync.strategy.finish()
        reason = sync.noise.reason
        table = torch.tensor([sample.read() for sample in found] or [NoiseShare()], dtype=torch.float64)
        comm.control.sum(table)
        return figures_of(table, comm.world_size), reason


def expected(micro_batches: int, ranks: int, skipped: int = -1) -> tuple[float, float]:
    """Return |G|² and tr Σ by the formula for micro-batches of any sizes, computed by one process."""
    gradients_sq, traces = [], []
    for step in range(1, STEPS + 1):
        if step == skipped:
            continue
        x = -samples_of(step)
        pieces = [
            x[own[part.start : part.stop]] for own in split(BATCH, ranks) for part in split(len(own), micro_batches)
        ]
        small = sum(len(piece) * float(piece.mean(0).square().sum()) for piece in pieces)
        mean = float(x.mean(0).square().sum())
        traces.append((small - BATCH * mean) / (len(pieces) - 1))
        gradients_sq.append(mean - traces[-1] / BATCH)
    return sum(gradients_sq) / len(gradients_sq), sum(traces) / len(traces)


def check_close_to_truth(figures: NoiseFigures, parts: int) -> None:
    """Check against the closed form, within six standard deviations of the estimators."""
    spread = TRACE * math.sqrt(2 / (DIMENSIONS * (parts - 1) * STEPS))
    assert abs(figures.trace - TRACE) < 6 * spread
    of_mean_sq = 4 * DISTANCE_SQ * SIGMA**2 / BATCH + 2 * DIMENSIONS * (SIGMA**2 / BATCH) ** 2
    spread_sq = math.sqrt(of_mean_sq / STEPS + (spread / BATCH) ** 2)
    assert abs(figures.gradient_sq - DISTANCE_SQ) < 6 * spread_sq


VARIANTS = ["ddp:bucket_view=true", "ddp:overlap=false", "parameter_server:servers=2"]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("strategy", [*EXCHANGING, *VARIANTS])
def test_noise_is_the_known_one_under_every_strategy(pool: Pool, strategy: str, ranks: int) -> None:
    for figures, _ in pool.run(measure, ranks, strategy, 1):
        assert figures is not None
        assert figures.steps == STEPS
        assert (figures.gradient_sq, figures.trace) == pytest.approx(expected(1, ranks), rel=1e-9)
        check_close_to_truth(figures, ranks)


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (1, "ddp"), (2, "ddp"), (2, "priority"), (2, "ring")])
def test_micro_batches_are_the_small_gradients(pool: Pool, ranks: int, strategy: str) -> None:
    figures, _ = pool.run(measure, ranks, strategy, 3)[0]
    assert figures is not None
    assert (figures.gradient_sq, figures.trace) == pytest.approx(expected(3, ranks), rel=1e-9)
    check_close_to_truth(figures, 3 * ranks)


def test_skipped_steps_are_left_out(pool: Pool) -> None:
    figures, _ = pool.run(measure, 2, "allreduce", 1, 5)[0]
    assert figures is not None
    assert figures.steps == STEPS - 1
    assert (figures.gradient_sq, figures.trace) == pytest.approx(expected(1, 2, skipped=5), rel=1e-9)


@pytest.mark.parametrize(
    ("ranks", "strategy", "reason"),
    [
        (1, "ddp", "--accumulate 2"),
        (2, "none", "do not exchange gradients"),
        (2, "parameter_server:asynchronous=true", "do not step together"),
    ],
)
def test_why_it_is_not_measured(pool: Pool, ranks: int, strategy: str, reason: str) -> None:
    for figures, found in pool.run(measure_nothing, ranks, strategy):
        assert figures is None
        assert found is not None
        assert reason in found


def measure_nothing(comm: Comm, strategy: str) -> tuple[None, str | None]:
    with Sync(
        Quadratic(), lambda named: torch.optim.SGD([p for _, p in named], lr=0.0), create(strategy), comm, "local"
    ) as sync:
        sync.measure_noise("auto", 1)
        return None, sync.noise.reason


def test_nodes_of_gradients_are_kept_in_measured_steps_only(pool: Pool) -> None:
    """Autograd makes new ones afterwards, in the stream of that time, as captures of CUDA graphs need it."""
    assert pool.run(find_marked_nodes, 1) == [(True, False)]


def find_marked_nodes(comm: Comm) -> tuple[bool, bool]:
    """Mark the node of a parameter in a measured step; return whether it is the same in backward, and afterwards."""
    with Sync(
        Quadratic(), lambda named: torch.optim.SGD([p for _, p in named], lr=0.0), create("single"), comm, "local"
    ) as sync:
        sync.measure_noise("all", 2)
        (_, parameter), *_ = sync.strategy.parameters
        sync.noise.begin_step(1)
        get_gradient_edge(parameter).node.metadata["is marked"] = True
        for number in range(2):
            sync.noise.begin_micro_batch(BATCH, 0.5)
            loss = 0.5 * sync.model(samples_of(number))
            during = "is marked" in get_gradient_edge(parameter).node.metadata
            loss.backward()
        del loss
        sync.noise.end_backward(None)
        sync.step()
        sync.noise.end_step()
        return during, "is marked" in get_gradient_edge(parameter).node.metadata


NORMS_S, EAGER_S, REPLAYED_S = 0.001, 0.020, 0.004
"""Times of the norms of a step, of a step without graphs, and of one with graphs."""
WINDOWS, WINDOW_STEPS = 1000, 25


@pytest.mark.parametrize(("are_replayed", "share", "measured"), [(False, 0.004, 2000), (True, 0.021, 125)])
def test_measuring_takes_its_share_of_the_time(pool: Pool, are_replayed: bool, share: float, measured: int) -> None:
    """The cost of a measured step, where others are replayed, is what it takes longer than they do.

    It is then so high that every 200th is measured, which is the least.
    """
    assert pool.run(train_on_a_clock, 1, are_replayed) == [
        (pytest.approx(share, rel=0.1), pytest.approx(measured, 0.1))
    ]


def train_on_a_clock(comm: Comm, are_replayed: bool) -> tuple[float, int]:
    """Make steps whose times a clock of our own shows; return the share of the measured ones, and their number."""
    now_s = 0.0
    step_s = REPLAYED_S if are_replayed else EAGER_S
    with (
        pytest.MonkeyPatch.context() as patch,
        Sync(
            Quadratic(), lambda named: torch.optim.SGD([p for _, p in named], lr=0.0), create("single"), comm, "local"
        ) as sync,
    ):
        patch.setattr(gradient_noise, "time", SimpleNamespace(perf_counter=lambda: now_s))
        sync.measure_noise("auto", 2)
        noise, spent_s, measured = sync.noise, 0.0, 0
        for window in range(WINDOWS):
            if window == 1 and are_replayed:
                noise.begin_replays()
                now_s = spent_s = measured = 0
            samples, began_s = [], now_s
            for step in range(window * WINDOW_STEPS, (window + 1) * WINDOW_STEPS):
                noise.begin_step(step)
                now_s += (EAGER_S if noise.is_measuring or window == 0 else step_s) + NORMS_S * noise.is_measuring
                sample = noise.end_step()
                if sample is not None:
                    sample.cost_s = max(sample.cost_s, NORMS_S)
                    samples.append(sample)
                    spent_s += EAGER_S + NORMS_S - step_s
            measured += len(samples)
            figures = NoiseFigures(
                steps=len(samples) or 1, gradient_sq=1.0, trace=1.0, cost_s=sum(one.cost_s for one in samples)
            )
            noise.adapt(figures if samples else None, now_s - began_s, WINDOW_STEPS)
        return spent_s / now_s, measured
