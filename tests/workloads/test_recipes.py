"""Tests of the recipes of built-in models, which train at every batch size, and of the choice of a run's recipe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from paceline.analysis.divergence import DivergenceDetector
from paceline.config import RunConfig
from paceline.config.recipe import RECIPE_SETTINGS, Recipe
from paceline.errors import UsageError
from paceline.training.learning_rate import learning_rate_factor
from paceline.training.optimizers.make import make_optimizer
from paceline.workloads.batches import Share, make_source
from paceline.workloads.load import load_workload
from paceline.workloads.names import MODEL_NAMES
from paceline.workloads.recipes import CLASSIC, DEFAULT, RECIPES, choose_recipe, with_recipe

pytestmark = pytest.mark.takes(15)


def test_every_model_has_a_default_and_a_classic_recipe() -> None:
    assert list(RECIPES) == list(MODEL_NAMES)
    assert all({DEFAULT, CLASSIC} <= set(named) for named in RECIPES.values())


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_classic_is_sgd_at_a_constant_learning_rate(model: str) -> None:
    recipe = choose_recipe(RunConfig(workload=model, recipe="classic"))
    assert (recipe.optimizer, recipe.schedule, recipe.scale_lr, recipe.nesterov) == ("sgd", "constant", "none", False)
    assert (recipe.momentum, recipe.weight_decay, recipe.warmup_epochs) == (0.9, 1e-4, 0)
    assert recipe.lr == (0.01 if model == "cnn" else 0.1)


def test_the_recipe_of_a_model_is_its_default_one() -> None:
    assert choose_recipe(RunConfig(workload="resnet18")) == RECIPES["resnet18"]["default"]
    assert choose_recipe(RunConfig(workload="resnet18", recipe="default")) == RECIPES["resnet18"]["default"]
    assert choose_recipe(RunConfig(workload="resnet18", recipe="classic", lr=0.3)).lr == 0.3


def test_a_workload_of_a_user_has_its_own_or_a_general_one() -> None:
    config = RunConfig(workload="mine:make")
    own = Recipe(optimizer="adamw", lr=3e-4)
    assert choose_recipe(config) == Recipe()
    assert choose_recipe(config, own) == own
    assert choose_recipe(RunConfig(workload="mine:make", schedule="cosine"), own).schedule == "cosine"


def test_a_file_changes_the_default_recipe_of_the_model(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("lr = 0.4\n")
    found = choose_recipe(RunConfig(workload="vgg11", recipe=str(file)))
    assert found.lr == 0.4
    assert found.weight_decay == RECIPES["vgg11"]["default"].weight_decay


@pytest.mark.parametrize(
    ("workload", "recipe", "message", "hint"),
    [
        ("cnn", "clasic", "there is no recipe 'clasic'.", "did you mean 'classic'?"),
        ("mine:make", "classic", "mine:make has no recipe 'classic'.", "give a TOML file"),
    ],
)
def test_an_unknown_recipe_is_refused(workload: str, recipe: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_recipe(RunConfig(workload=workload, recipe=recipe))
    assert caught.value.message == message
    assert hint in (caught.value.hint or "")


def test_a_config_with_its_recipe_has_all_values() -> None:
    config = RunConfig(workload="cnn", lr=0.3)
    filled = with_recipe(config, choose_recipe(config))
    assert all(getattr(filled, name) is not None for name in RECIPE_SETTINGS)
    assert (filled.lr, filled.scale_lr) == (0.3, "none")


SMALL = "synthetic:size=64,test_size=16"


def test_label_smoothing_changes_the_training_loss_alone() -> None:
    workload = load_workload(RunConfig(workload="cnn", data=SMALL, label_smoothing=0.2))
    images, labels = workload.train.batch(torch.arange(8), seed=0, epoch=None)
    with torch.no_grad():
        logits = workload.model(images)
        smoothed, plain = (
            one(workload.model, (images, labels)).loss for one in (workload.forward, workload.test_forward)
        )
    assert smoothed == pytest.approx(float(F.cross_entropy(logits, labels, label_smoothing=0.2)))
    assert plain == pytest.approx(float(F.cross_entropy(logits, labels)))
    assert smoothed != plain


def test_zero_gamma_makes_residual_blocks_start_as_their_shortcut() -> None:
    with_zero = load_workload(RunConfig(workload="resnet18", data=SMALL, zero_gamma=True)).model
    plain = load_workload(RunConfig(workload="resnet18", data=SMALL, zero_gamma=False)).model
    block, other = with_zero[3], plain[3]
    x = torch.randn(2, 64, 8, 8)
    assert torch.equal(block(x), F.relu(x))
    assert not torch.equal(other(x), F.relu(x))
    assert with_zero[5].shortcut[1].weight.min() == 1, "the shortcut's own BatchNorm is left alone"
    with pytest.raises(UsageError, match="vgg11 has no residual blocks"):
        load_workload(RunConfig(workload="vgg11", data=SMALL, zero_gamma=True))


# Training: a part of the matrix in `make test`, the whole in `make soak`.

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
