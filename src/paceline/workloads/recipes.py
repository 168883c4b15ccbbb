"""Recipes of the built-in models, and the choice of a run's recipe. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

from paceline.config import RunConfig
from paceline.config.recipe import Recipe, is_recipe_file, override_by_run, read_recipe
from paceline.errors import UsageError, unknown_name
from paceline.workloads.names import is_user_workload

DEFAULT, CLASSIC, SGD = "default", "classic", "sgd"

RECIPES: Mapping[str, Mapping[str, Recipe]] = {
    "cnn": {
        DEFAULT: Recipe(
            lr=0.02,
            scale_lr="sqrt",
            nesterov=True,
            schedule="cosine",
            warmup_epochs=1.0,
            warmup_steps=50,
        ),
        CLASSIC: Recipe(lr=0.01),
    },
    "vgg11": {
        DEFAULT: Recipe(
            lr=0.07,
            scale_lr="sqrt",
            nesterov=True,
            weight_decay=2e-3,
            schedule="triangular",
            warmup_epochs=2.0,
            warmup_steps=300,
            label_smoothing=0.1,
            cutout=4,
        ),
        CLASSIC: Recipe(lr=0.1),
    },
    "resnet18": {
        DEFAULT: Recipe(
            optimizer="muon",
            lr=0.006,
            reference_batch=512,
            scale_lr="sqrt",
            momentum=0.95,
            weight_decay=0.3,
            schedule="triangular",
            warmup_epochs=2.0,
            warmup_steps=100,
            label_smoothing=0.1,
            cutout=12,
        ),
        SGD: Recipe(
            lr=0.2,
            scale_lr="sqrt",
            nesterov=True,
            weight_decay=1e-3,
            schedule="triangular",
            warmup_epochs=2.0,
            warmup_steps=100,
            label_smoothing=0.1,
            cutout=12,
            zero_gamma=True,
        ),
        CLASSIC: Recipe(lr=0.1),
    },
}
"""Recipes by model and name. `default` trains at every batch size; `classic` has the settings of the published
experiments (docs/classic.md): SGD with momentum 0.9, weight decay 1e-4 and a constant learning rate. `sgd` is the best
that was found for SGD, where the default is another optimiser: Muon reaches a higher accuracy in 30 epochs, but its
steps cost more, on a CPU with small batches most of all."""


def choose_recipe(config: RunConfig, own: Recipe | None = None) -> Recipe:
    """Return the recipe of a run: its file, the named one or the workload's, with the run's own values over it.

    `own` is the recipe that a user's workload brings.
    """
    named, base = _named(config, own), base_recipe(config, own)
    if is_recipe_file(config.recipe):
        base = read_recipe(config.recipe, base)
    elif config.recipe:
        if config.recipe not in named:
            raise _unknown_recipe(config, named)
        base = named[config.recipe]
    return override_by_run(base, config)


def base_recipe(config: RunConfig, own: Recipe | None = None) -> Recipe:
    """Return the recipe that a recipe file changes: the workload's default."""
    return _named(config, own).get(DEFAULT, Recipe())


def _named(config: RunConfig, own: Recipe | None) -> Mapping[str, Recipe]:
    return {DEFAULT: own or Recipe()} if is_user_workload(config.workload) else RECIPES.get(config.workload, {})


def with_recipe(config: RunConfig, recipe: Recipe) -> RunConfig:
    """Return the config with all values of its recipe."""
    return replace(config, **asdict(recipe))


def _unknown_recipe(config: RunConfig, named: Mapping[str, Recipe]) -> UsageError:
    if is_user_workload(config.workload):
        return UsageError(
            f"{config.workload} has no recipe {config.recipe!r}.",
            hint="give a TOML file, or let make_workload return Workload(recipe=paceline.Recipe(…))",
        )
    return unknown_name("recipe", config.recipe, [*named, "FILE.toml"])
