"""The default recipes train at every batch size: a part in `make test`, the whole matrix in `make soak`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from paceline.analysis.divergence import DivergenceDetector
from paceline.config import RunConfig
from paceline.training.learning_rate import learning_rate_factor
from paceline.training.optimizers.make import make_optimizer
from paceline.workloads.batches import Share, make_source
from paceline.workloads.load import load_workload

EPOCHS = 5
BATCHES = (32, 256, 1024)
SEEDS = range(10)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Train on one thread: on a busy machine, threads of such small operations mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Trained(NamedTuple):
    """Losses of a run, and its test accuracy."""

    losses: list[float]
    accuracy: float


def train(config: RunConfig, device: torch.device, epochs: int = EPOCHS) -> Trained:
    """Train in this process, by the recipe of the workload."""
    workload = load_workload(config)
    recipe, model = workload.recipe, workload.model.to(device)
    assert recipe is not None
    share = Share(0, 1, 1, device)
    source = make_source(workload.train, share, batch=config.global_batch(1), seed=config.seed)
    per_epoch = source.expected_steps
    assert per_epoch is not None
    peak = recipe.peak_lr(source.batch)
    optimizer = make_optimizer(list(model.named_parameters()), recipe, peak)
    losses: list[torch.Tensor] = []
    for epoch in range(epochs):
        for (whole,) in source.epoch(epoch):
            for group in optimizer.param_groups:
                group["lr"] = peak * learning_rate_factor(recipe, len(losses), epochs * per_epoch, per_epoch)
            loss = workload.forward(model, source.fetch(whole)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    model.eval()
    tests = make_source(workload.test, share, batch=min(256, len(workload.test)), seed=0, train=False)
    with torch.no_grad():
        outcomes = [workload.test_forward(model, tests.fetch(whole)) for (whole,) in tests.epoch(None)]
    correct = sum(int(counted) for one in outcomes if (counted := workload.count_correct(one)) is not None)
    return Trained(torch.stack(losses).tolist(), correct / len(workload.test))


def check_trains(model: str, data: str, batch: int, seed: int, device: torch.device) -> None:
    """Assert that a run does not diverge, never exceeds a few times its first loss, and ends below it."""
    losses = train(RunConfig(workload=model, data=data, batch=batch, seed=seed), device).losses
    detector = DivergenceDetector()
    detector.add(losses)
    assert detector.found is None
    assert max(losses) < 4 * losses[0], "training is stable"
    assert sum(losses[-3:]) / 3 < losses[0]


@pytest.mark.parametrize("batch", BATCHES)
def test_the_small_model_never_diverges(batch: int) -> None:
    for seed in range(2):
        check_trains("cnn", "digits", batch, seed, torch.device("cpu"))


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("data", ["digits", "synthetic"])
def test_the_small_model_never_diverges_in_the_whole_matrix(data: str, batch: int, seed: int) -> None:
    check_trains("cnn", data, batch, seed, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.soak
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("data", ["digits", "synthetic"])
@pytest.mark.parametrize("model", ["vgg11", "resnet18"])
def test_large_models_never_diverge(model: str, data: str, batch: int) -> None:
    for seed in SEEDS:
        check_trains(model, data, batch, seed, torch.device("cuda"))


def test_digits_are_learnt() -> None:
    """In 20 epochs of 45 steps, which take seconds on one core."""
    assert train(RunConfig(batch=32), torch.device("cpu"), epochs=20).accuracy >= 0.97
