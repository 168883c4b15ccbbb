"""`Recipe`: how a workload is trained, apart from its length: optimiser, learning rate, schedule, regularisation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from paceline.config.fields import read_toml
from paceline.config.setting import NOT_NEGATIVE, POSITIVE, Bound, check_values, setting
from paceline.errors import UsageError

OptimizerName = Literal["sgd", "adamw", "lars", "lamb", "muon"]
ScheduleName = Literal["constant", "step", "cosine", "triangular"]
ScaleRule = Literal["linear", "sqrt", "none"]
Precision = Literal["fp32", "bf16", "fp16", "fp64", "auto"]
AUTO_PRECISION: Precision = "auto"
"""Precision that a run chooses between fp32 and bf16 before it trains."""
SHARE = Bound("0 or more, and less than 1", lambda value: 0 <= value < 1)
FILE_SUFFIX = ".toml"
MOMENTUM_OPTIMIZERS: tuple[OptimizerName, ...] = ("sgd", "lars", "muon")
NESTEROV_OPTIMIZERS: tuple[OptimizerName, ...] = ("sgd", "lars")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Settings that say how to train a workload. The defaults are for a model of which nothing is known."""

    optimizer: OptimizerName = "sgd"
    """Optimiser."""
    lr: float = setting(0.02, bound=NOT_NEGATIVE)
    """Peak learning rate at the reference batch."""
    reference_batch: int = setting(256, bound=POSITIVE)
    """Global batch that the learning rate is meant for."""
    scale_lr: ScaleRule = "none"
    """Scaling of the learning rate with the global batch: by its ratio to the reference batch, by the square root of
    the ratio, or not at all."""
    momentum: float = setting(0.9, bound=SHARE)
    """Momentum of SGD, LARS and Muon."""
    nesterov: bool = False
    """Nesterov momentum, for SGD and LARS."""
    weight_decay: float = setting(1e-4, bound=NOT_NEGATIVE)
    """Weight decay."""
    schedule: ScheduleName = "constant"
    """Learning rate after warm-up: constant, ÷ 10 at half and at three quarters of the run, down to 0 along a cosine,
    or down to 0 along a straight line."""
    warmup_epochs: float = setting(0.0, bound=NOT_NEGATIVE)
    """Epochs in which the learning rate rises linearly from 0. A run of less than twice as many epochs spends its first
    half rising, and does not reach the peak."""
    warmup_steps: int = setting(0, bound=NOT_NEGATIVE)
    """Least number of steps in which the learning rate rises."""
    label_smoothing: float = setting(0.0, bound=SHARE)
    """Probability that the training loss spreads over all classes."""
    cutout: int = setting(0, bound=NOT_NEGATIVE)
    """Side of the square that is cut out of each training image, in pixels."""
    zero_gamma: bool = False
    """Set the weight of the last BatchNorm of each residual block to 0 at the start."""
    precision: Precision = "fp32"
    """Number format; auto chooses between fp32 and bf16."""

    def __post_init__(self) -> None:
        check_values(self)
        if self.nesterov and self.optimizer not in NESTEROV_OPTIMIZERS:
            raise UsageError(
                f"{self.optimizer} has no Nesterov momentum.", hint="leave out nesterov, or use sgd or lars"
            )
        if self.nesterov and not self.momentum:
            raise UsageError("nesterov needs momentum.", hint="use a momentum above 0, for example 0.9")

    def peak_lr(self, batch: int | None) -> float:
        """Return the learning rate after warm-up at a global batch; None for a batch that is unknown."""
        if batch is None or self.scale_lr == "none":
            return self.lr
        ratio = batch / self.reference_batch
        return self.lr * (ratio if self.scale_lr == "linear" else math.sqrt(ratio))


class WarmUp(Protocol):
    """Length of a warm-up, of a recipe or of a recorded one."""

    @property
    def warmup_epochs(self) -> float:
        """Epochs in which the learning rate rises."""

    @property
    def warmup_steps(self) -> int:
        """Least number of steps."""


def warm_up_length(recipe: WarmUp, steps_per_epoch: float) -> int:
    """Return the steps in which the learning rate rises to its peak."""
    return max(math.ceil(recipe.warmup_epochs * steps_per_epoch), recipe.warmup_steps)


def reached_share(warm_up: int, steps: float | None) -> float:
    """Return the share of the peak that a run reaches: less than 1 if it is shorter than twice its warm-up."""
    return 1.0 if steps is None or 2 * warm_up <= steps else steps / (2 * warm_up)


OPTIMIZER_SETTINGS: Mapping[OptimizerName, Mapping[str, Any]] = {
    "sgd": {"lr": 0.02, "weight_decay": 1e-4, "momentum": 0.9, "scale_lr": "none"},
    "adamw": {"lr": 1e-3, "weight_decay": 0.01, "scale_lr": "sqrt"},
    "lars": {"lr": 2.0, "weight_decay": 1e-4, "momentum": 0.9, "scale_lr": "sqrt"},
    "lamb": {"lr": 5e-3, "weight_decay": 0.01, "scale_lr": "sqrt"},
    "muon": {"lr": 1e-3, "weight_decay": 0.01, "momentum": 0.95, "scale_lr": "sqrt"},
}
"""Settings of an optimiser where a recipe is for another one: a learning rate of SGD is of no use to AdamW."""


class RecipeOverrides(Protocol):
    """Settings of a run: the recipe, and values that override single settings of it; None for those not given."""

    @property
    def recipe(self) -> str:
        """Name or file of the recipe; empty for the workload's default."""


RECIPE_SETTINGS = tuple(own.name for own in fields(Recipe))
"""Names of the settings of a recipe; `RunConfig` has fields of the same names."""


def is_recipe_file(name: str) -> bool:
    """Whether the value of `--recipe` is a file, not a name."""
    return name.endswith(FILE_SUFFIX) or "/" in name


def settings_of_file(path: str) -> dict[str, Any]:
    """Return the settings that a recipe file gives."""
    return read_toml(Path(path), Recipe, option="--recipe")


def read_recipe(path: str, base: Recipe) -> Recipe:
    """Return the recipe of a TOML file; settings that it leaves out are those of `base`."""
    values = settings_of_file(path)
    try:
        return override(base, values)
    except UsageError as error:
        raise UsageError(f"{path} is refused: {error.message}", hint=error.hint) from None


def override(base: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Return a recipe with other values. Another optimiser brings its own learning rate, momentum and weight decay."""
    name = values.get("optimizer", base.optimizer)
    own = {} if name == base.optimizer else {"nesterov": False, **OPTIMIZER_SETTINGS.get(name, {})}
    return replace(base, **{**own, **values})


def override_by_run(base: Recipe, config: RecipeOverrides) -> Recipe:
    """Return the recipe with the values that a run sets itself.

    A learning rate that is given alone is meant for the batch at hand, so it is not scaled; epochs of warm-up that are
    given alone are meant exactly.
    """
    given = {name: value for name in RECIPE_SETTINGS if (value := getattr(config, name)) is not None}
    if "lr" in given:
        given.setdefault("scale_lr", "none")
    if given.get("momentum") == 0:
        given.setdefault("nesterov", False)
    if "warmup_epochs" in given:
        given.setdefault("warmup_steps", 0)
    return override(base, given)
