"""Tests of recipes: values, files, what overrides what, and scaling of the learning rate."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import RunConfig
from paceline.config.recipe import (
    OPTIMIZER_SETTINGS,
    RECIPE_SETTINGS,
    Recipe,
    is_recipe_file,
    override,
    override_by_run,
    reached_share,
    read_recipe,
    warm_up_length,
)
from paceline.errors import UsageError

BASE = Recipe(lr=0.2, reference_batch=128, scale_lr="linear", nesterov=True, weight_decay=5e-4, warmup_steps=70)


def test_a_run_has_a_setting_for_each_value_of_a_recipe_and_sets_none_by_default() -> None:
    config = RunConfig()
    assert [getattr(config, name) for name in RECIPE_SETTINGS] == [None] * len(RECIPE_SETTINGS)
    assert override_by_run(BASE, config) == BASE


@pytest.mark.parametrize(
    ("rule", "batch", "expected"),
    [
        ("linear", 256, 0.4),
        ("linear", 32, 0.05),
        ("sqrt", 512, 0.4),
        ("sqrt", 128, 0.2),
        ("none", 4096, 0.2),
        ("linear", None, 0.2),
    ],
)
def test_the_learning_rate_scales_with_the_batch(rule: str, batch: int | None, expected: float) -> None:
    assert override(BASE, {"scale_lr": rule}).peak_lr(batch) == pytest.approx(expected)


def test_a_learning_rate_given_alone_is_used_as_given() -> None:
    assert override_by_run(BASE, RunConfig(lr=0.3)).peak_lr(1024) == 0.3
    assert override_by_run(BASE, RunConfig(lr=0.3, scale_lr="linear")).peak_lr(256) == pytest.approx(0.6)
    assert override_by_run(BASE, RunConfig(scale_lr="sqrt")).peak_lr(512) == pytest.approx(0.4)


def test_epochs_of_warm_up_given_alone_are_meant_exactly() -> None:
    assert override_by_run(BASE, RunConfig(warmup_epochs=1.5)).warmup_steps == 0
    assert override_by_run(BASE, RunConfig(warmup_epochs=1.5, warmup_steps=9)).warmup_steps == 9


@pytest.mark.parametrize("name", [name for name in OPTIMIZER_SETTINGS if name != "sgd"])
def test_another_optimiser_brings_its_own_learning_rate(name: str) -> None:
    found = override_by_run(BASE, RunConfig(optimizer=name))  # type: ignore[arg-type]
    assert found.lr == OPTIMIZER_SETTINGS[name]["lr"] != BASE.lr  # type: ignore[index]
    assert not found.nesterov
    assert found.warmup_steps == BASE.warmup_steps, "the schedule does not belong to the optimiser"
    assert override_by_run(BASE, RunConfig(optimizer=name, lr=0.5)).lr == 0.5  # type: ignore[arg-type]
    assert override_by_run(BASE, RunConfig(optimizer="sgd")).lr == BASE.lr


def test_sgd_in_place_of_another_optimiser_brings_its_own_learning_rate() -> None:
    lars = Recipe(optimizer="lars", lr=2.0, scale_lr="sqrt")
    found = override_by_run(lars, RunConfig(optimizer="sgd"))
    assert (found.lr, found.scale_lr) == (Recipe().lr, Recipe().scale_lr)


def test_momentum_of_zero_turns_nesterov_off() -> None:
    found = override_by_run(BASE, RunConfig(momentum=0.0))
    assert (found.momentum, found.nesterov) == (0, False)


def test_a_file_sets_some_values_and_leaves_the_others(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('lr = 0.7\nschedule = "cosine"\nwarmup-epochs = 3\nzero_gamma = true\n')
    found = read_recipe(str(file), BASE)
    assert (found.lr, found.schedule, found.warmup_epochs, found.zero_gamma) == (0.7, "cosine", 3, True)
    assert (found.weight_decay, found.scale_lr) == (BASE.weight_decay, "linear")
    file.write_text('optimizer = "adamw"\n')
    assert read_recipe(str(file), BASE).lr == 1e-3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr = -1", "--lr is -1."),
        ('schedule = "cosin"', "--schedule cannot be 'cosin'."),
        ('lr = "high"', "lr in {file} is 'high'."),
        ("learning_rate = 1", "there is no setting (in {file}) 'learning_rate'."),
        ("epochs = 3", "there is no setting (in {file}) 'epochs'."),
        ("lr = ", "{file} is not valid TOML"),
        ('optimizer = "adamw"\nnesterov = true', "adamw has no Nesterov momentum."),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_recipe(str(file), BASE)
    assert message.format(file=file) in caught.value.message
    assert str(file) in caught.value.message


def test_a_missing_file_is_named_with_its_option(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_recipe(str(tmp_path / "none.toml"), BASE)
    assert "none.toml: No such file" in caught.value.message
    assert caught.value.hint == "--recipe takes a TOML file"


@pytest.mark.parametrize(
    ("name", "expected"), [("classic", False), ("a.toml", True), ("recipes/fast", True), ("", False)]
)
def test_a_file_is_told_from_a_name(name: str, expected: bool) -> None:
    assert is_recipe_file(name) is expected


@pytest.mark.parametrize(
    "values", [{"momentum": 1.0}, {"lr": float("nan")}, {"label_smoothing": 1.0}, {"nesterov": True, "momentum": 0.0}]
)
def test_values_without_a_meaning_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Recipe(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(("steps", "share"), [(200, 1.0), (100, 1.0), (50, 0.5), (10, 0.1), (None, 1.0)])
def test_a_short_run_reaches_a_share_of_the_peak(steps: int | None, share: float) -> None:
    assert reached_share(50, steps) == pytest.approx(share)


def test_the_warm_up_has_at_least_its_steps() -> None:
    assert warm_up_length(Recipe(warmup_epochs=1.5, warmup_steps=20), steps_per_epoch=10) == 20
    assert warm_up_length(Recipe(warmup_epochs=2.5, warmup_steps=20), steps_per_epoch=10) == 25
