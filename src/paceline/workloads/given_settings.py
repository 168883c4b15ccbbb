"""Refuse settings that a user gave, as an option or in a recipe file, and that have no effect on the run.

What a default recipe or a workload's own sets is not refused: nobody asked for it in this run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from paceline.config import RunConfig
from paceline.config.recipe import (
    MOMENTUM_OPTIMIZERS,
    Recipe,
    is_recipe_file,
    read_recipe,
    settings_of_file,
)
from paceline.config.setting import WorkloadPart, metadata_of, option_name
from paceline.errors import UsageError
from paceline.workloads import data
from paceline.workloads.names import RESIDUAL_MODELS
from paceline.workloads.recipes import base_recipe, choose_recipe

PART_NAMES: Mapping[WorkloadPart, str] = {"train": "data", "optimizer": "optimizer", "scheduler": "scheduler"}


def check_recipe(config: RunConfig, own: Recipe | None = None) -> None:
    """Raise for a setting of a recipe that the recipe itself leaves without effect.

    `own` is the recipe that a user's workload brings. The values of a file are checked with those of the file alone: an
    option may override them.
    """
    if is_recipe_file(config.recipe):
        values = settings_of_file(config.recipe)
        names = {name: f"{name} in {config.recipe}" for name in values}
        _check_recipe(read_recipe(config.recipe, base_recipe(config, own)), names)
    _check_recipe(choose_recipe(config, own), _options(config))


def _check_recipe(recipe: Recipe, given: Mapping[str, str]) -> None:
    """Raise for a setting without effect; `given` has the name of each for the error."""
    if "momentum" in given and recipe.optimizer not in MOMENTUM_OPTIMIZERS:
        raise UsageError(
            f"{given['momentum']} has no effect on {recipe.optimizer}, which has no such setting.",
            hint=f"leave it out, or use an optimiser with momentum: {', '.join(MOMENTUM_OPTIMIZERS)}",
        )
    if "reference_batch" in given and recipe.scale_lr == "none":
        raise UsageError(
            f"{given['reference_batch']} has no effect, since the learning rate is not scaled with the batch.",
            hint="add --scale-lr linear or --scale-lr sqrt, or leave it out",
        )


def check_needed(config: RunConfig, *others: object) -> None:
    """Raise for a setting, of the run or of another config of the command, that needs one which was not given."""
    given = _options(config)
    for own in (config, *others):
        for name, metadata in metadata_of(type(own)).items():
            if metadata.needs and metadata.needs not in given and name in _options(own):
                needed = option_name(RunConfig, metadata.needs)
                raise UsageError(
                    f"{_options(own)[name]} has no effect without {needed}.", hint=f"add {needed}, or leave it out"
                )


def check_built_in(config: RunConfig) -> None:
    """Raise for a setting that has no effect on a built-in model or its data set, or does not suit it."""
    given, recipe = _given(config), choose_recipe(config)
    if config.tta != "none" and not data.has_mirrors(config.data):
        raise UsageError(
            f"--tta {config.tta} was given, but in the data set {config.data} a mirror image has another class or "
            "none.",
            hint="leave --tta out",
        )
    if "cutout" in given and recipe.cutout and not (config.augment and data.is_augmented(config.data)):
        reason = f"the data set {config.data} is not augmented" if config.augment else "--no-augment was given"
        augmented = [name for name, kind in data.REGISTRY.items() if kind.augmented]
        raise UsageError(
            f"{given['cutout']} has no effect: {reason}.",
            hint=f"leave {'it' if config.augment else 'one of the two'} out"
            + (f", or use a data set with augmentation: {', '.join(augmented)}" if config.augment else ""),
        )
    if "zero_gamma" in given and recipe.zero_gamma and config.workload not in RESIDUAL_MODELS:
        raise UsageError(
            f"{given['zero_gamma']} has no effect: {config.workload} has no residual blocks.",
            hint=f"leave it out, or use a model with residual blocks: {', '.join(RESIDUAL_MODELS)}",
        )


def check_replaced(config: RunConfig, workload: object) -> None:
    """Raise for a setting that a part of a user's workload takes the place of.

    Call it only if the workload was made without the run's configuration: otherwise it may have used the setting.
    """
    given = _given(config)
    for name, metadata in metadata_of(RunConfig).items():
        part = metadata.replaced_by
        if name in given and part is not None and getattr(workload, part) is not None:
            raise UsageError(
                f"{given[name]} has no effect: {config.workload} has its own {PART_NAMES[part]}.",
                hint=f"leave it out, or give the function a parameter, as in make_workload(config), and use "
                f"config.{name} there",
            )


def _given(config: RunConfig) -> dict[str, str]:
    """Return the settings that the user gave, and the name of each for an error."""
    in_file = settings_of_file(config.recipe) if is_recipe_file(config.recipe) else {}
    names = {name: f"{name} in {config.recipe}" for name in in_file}
    return names | _options(config)


def _options(config: Any) -> dict[str, str]:
    """Return the settings of a config that differ from the defaults, and the option of each."""
    values = {own.name: (getattr(config, own.name), own.default) for own in fields(config)}
    return {name: _option(type(config), name, value) for name, (value, default) in values.items() if value != default}


def _option(kind: type, name: str, value: Any) -> str:
    option = option_name(kind, name)
    return option.replace("--", "--no-", 1) if value is False else option
