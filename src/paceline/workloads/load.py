"""Load a workload by its name: a built-in model on a data set, or a function in a user's module."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.nn.functional as F

from paceline.config import RunConfig
from paceline.config.recipe import Recipe
from paceline.errors import PacelineError, UsageError, WorkloadError, unknown_name
from paceline.user_code import check_module, import_module
from paceline.workloads import data
from paceline.workloads.data.images import ImageSet
from paceline.workloads.given_settings import check_built_in, check_recipe, check_replaced
from paceline.workloads.models import MODELS
from paceline.workloads.names import MODEL_NAMES, is_user_workload
from paceline.workloads.random_state import seed_everything
from paceline.workloads.recipes import choose_recipe, with_recipe
from paceline.workloads.sampler import epoch_key
from paceline.workloads.workload import Workload, count_top1
from paceline.workloads.zero_gamma import zero_gamma

BEFORE_FIRST_EPOCH = -1


def seed_imports(config: RunConfig) -> None:
    """Seed the generators for the import of the user's modules: equally on all ranks, and not as for a function."""
    seed_everything(epoch_key(config.seed, BEFORE_FIRST_EPOCH))


def load_workload(config: RunConfig) -> Workload:
    """Return the workload of a run; it is the same on all ranks, and its random numbers depend only on the seed."""
    workload = _load_user(config) if is_user_workload(config.workload) else _load_built_in(config)
    check_recipe(config, workload.recipe)
    return _with_recipe(workload, choose_recipe(config, workload.recipe))


def _with_recipe(workload: Workload, recipe: Recipe) -> Workload:
    """Return the workload with the recipe of its run, which changes the model and the training loss."""
    if recipe.zero_gamma:
        zero_gamma(workload.model)
    if recipe.cutout and not isinstance(workload.train, ImageSet):
        raise UsageError(
            "cutout needs a built-in data set.", hint="leave it out, or cut squares out in the workload's own data set"
        )
    if recipe.label_smoothing and workload.loss is not F.cross_entropy:
        raise UsageError(
            "label smoothing needs torch.nn.functional.cross_entropy as the loss of the workload.",
            hint="leave it out, or smooth the labels in the workload's own loss",
        )
    return replace(workload, recipe=recipe, label_smoothing=recipe.label_smoothing)


def _load_built_in(config: RunConfig) -> Workload:
    seed_everything(config.seed)
    if config.workload not in MODELS:
        raise unknown_name("workload", config.workload, MODEL_NAMES)
    check_built_in(config)
    train, test = data.load(config.data, data_dir=data.data_dir(config.data_dir))
    is_augmented = config.augment and (train.crop_padding > 0 or train.flip)
    train = (
        replace(train, cutout=choose_recipe(config).cutout)
        if is_augmented
        else replace(train, crop_padding=0, flip=False)
    )
    channels, height, width = train.images.shape[1:]
    return Workload(
        name=f"{config.workload} on {config.data}",
        model=MODELS[config.workload]((channels, height, width), train.classes),
        train=train,
        test=test,
        loss=F.cross_entropy,
        correct=count_top1,
        classes=train.classes,
    )


def _load_user(config: RunConfig) -> Workload:
    module_name, _, function_name = config.workload.partition(":")
    seed_imports(config)
    check_module(module_name)
    module = import_module(module_name)
    # Again, since on some ranks an earlier run has imported the module, and then the import draws nothing.
    seed_everything(config.seed)
    make = getattr(module, function_name, None)
    if not callable(make):
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise unknown_name(f"function in {module_name!r} named", function_name, functions)
    filled = with_recipe(config, choose_recipe(config))  # So that `config.lr` is a number.
    try:
        made = make(filled) if _takes_config(make) else make()
    except PacelineError:
        raise
    except Exception as error:
        raise _failed(f"{config.workload}()", error) from None
    if not isinstance(made, Workload):
        raise WorkloadError(
            f"{config.workload}() returned a {type(made).__name__}, not a Workload.", hint="return paceline.Workload(…)"
        )
    if not _takes_config(make):
        check_replaced(config, made)
    return made if made.name else replace(made, name=config.workload)


def _takes_config(make: Callable[..., Any]) -> bool:
    """Whether the function has a positional parameter, for the run's configuration."""
    kinds = [parameter.kind for parameter in inspect.signature(make).parameters.values()]
    return any(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)


def _failed(what: str, error: Exception) -> WorkloadError:
    return WorkloadError(
        f"{what} failed: {type(error).__name__}: {error}",
        hint="correct the function; the traceback above shows where it failed",
        detail=traceback.format_exc().rstrip(),
    )
