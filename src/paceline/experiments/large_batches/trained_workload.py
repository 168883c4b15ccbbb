"""Facts about a workload that decide which large batches and remedies can be tried: recipe, samples, BatchNorm."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from paceline.config import RunConfig
from paceline.config.recipe import Recipe
from paceline.errors import UsageError
from paceline.workloads.batches import Share, make_source
from paceline.workloads.load import load_workload
from paceline.workloads.names import is_user_workload
from paceline.workloads.random_state import kept_random_state
from paceline.workloads.recipes import CLASSIC
from paceline.workloads.zero_gamma import last_norms

SERIAL = Share(0, 1, 1, torch.device("cpu"))
"""Share of one process that trains everything, on a CPU."""


@dataclass(frozen=True)
class TrainedWorkload:
    """Facts about the workload of an experiment."""

    recipe: Recipe
    """Recipe of the reference, whose learning rate may be meant for another batch."""
    samples: int | None
    """Samples of the training data; None if they are unknown."""
    has_residual_norms: bool
    """Whether its model has residual blocks that end in a BatchNorm."""


def with_plain_recipe(base: RunConfig) -> RunConfig:
    """Return the config with the recipe of the published experiments, if it has a built-in model and names none."""
    return base if base.recipe or is_user_workload(base.workload) else replace(base, recipe=CLASSIC)


def examine_workload(base: RunConfig) -> TrainedWorkload:
    """Load the workload of a config; raise if remedies would have no effect on it."""
    with kept_random_state():  # Loading the workload seeds the generators of this process.
        workload = load_workload(base)
        source = make_source(workload.train, SERIAL, batch=1, seed=base.seed)
    if source.batch is None:
        raise UsageError(
            f"the training data of {base.workload} is an iterable of batches, so its batch cannot be changed.",
            hint="return a data set of samples, which has a length, as Workload(train=…)",
        )
    for part in ("optimizer", "scheduler"):
        if getattr(workload, part) is not None:
            raise UsageError(
                f"{base.workload} has its own {part}, which remedies cannot change.",
                hint=f"return Workload(recipe=paceline.Recipe(…)) in place of {part}=…",
            )
    assert workload.recipe is not None, "load_workload() sets the recipe"
    return TrainedWorkload(workload.recipe, source.samples, bool(last_norms(workload.model)))
