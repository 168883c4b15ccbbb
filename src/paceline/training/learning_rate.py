"""Learning rate of a run: warm-up and schedule of the recipe, or the workload's own scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch

from paceline.config.recipe import Recipe, ScheduleName, reached_share, warm_up_length
from paceline.errors import WorkloadError
from paceline.workloads.workload import Workload

STEP_DECAY = 0.1
STEP_MILESTONES = (0.5, 0.75)
"""Shares of the steps after warm-up at which the schedule `step` multiplies the learning rate by `STEP_DECAY`."""


def schedule_factor(schedule: ScheduleName, progress: float) -> float:
    """Return the learning rate ÷ its peak, after a share `progress` of the steps that follow the warm-up."""
    if schedule == "step":
        return STEP_DECAY ** sum(progress >= milestone for milestone in STEP_MILESTONES)
    if schedule == "cosine":
        return (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    if schedule == "triangular":
        return max(0.0, 1 - progress)
    return 1.0


def learning_rate_factor(recipe: Recipe, step: int, steps: float | None, steps_per_epoch: float) -> float:
    """Return the learning rate of a step, counted from 0, ÷ the peak of the recipe.

    `steps` is the length of the run, if known. In a run of less than twice the warm-up, the learning rate rises at the
    same rate until half of the run, and falls from there: a short run must not take larger steps sooner.
    """
    rising = warm_up_length(recipe, steps_per_epoch)
    top = reached_share(rising, steps)
    if steps is not None and top < 1:
        rising = int(steps // 2)
    if step < rising:
        return top * (step + 1) / (rising + 1)
    if steps is None:
        return top
    return top * schedule_factor(recipe.schedule, (step - rising) / max(1, steps - rising))


class LearningRate(Protocol):
    """Setter of the learning rate before each step."""

    def before_step(self, step: int) -> None:
        """Set the learning rate of the step with this number, counted from 0."""

    def state(self) -> Any:
        """Return what a checkpoint keeps."""

    def can_load(self, state: Any) -> bool:
        """Return whether `load` can continue from a kept state, None if there is none."""

    def load(self, state: Any) -> list[str]:
        """Continue from a kept state, None if there is none; return what could not be used, in words."""


class RecipeRate:
    """Learning rate by the recipe: that of each parameter group × a factor, which all ranks compute alike."""

    def __init__(
        self,
        recipe: Recipe,
        optimizer: torch.optim.Optimizer,
        steps_per_epoch: int | None,
        steps: Callable[[int], int | None],
        *,
        ends_by_time: bool = False,
    ) -> None:
        self._recipe = recipe
        self._ends_by_time = ends_by_time
        self._groups = [(group, float(group["lr"])) for group in optimizer.param_groups]
        self._steps_per_epoch = steps_per_epoch
        self._steps = steps
        """Returns the length of the run in steps, as far as it is known at a step."""
        self._progress = 0.0
        """Largest share of the run that was done before a step, by the estimate at that time."""

    def before_step(self, step: int) -> None:
        steps: float | None = self._steps(step)
        if steps is not None:  # The estimate of a run that ends by time may grow, but its schedule never goes back.
            steps = min(steps, step / self._progress) if self._progress and step else steps
            self._progress = step / steps
        factor = learning_rate_factor(self._recipe, step, steps, self._steps_per_epoch or 0)
        for group, peak in self._groups:
            if group["lr"] != peak * factor:
                group["lr"] = peak * factor

    def state(self) -> Any:
        return {"progress": self._progress}

    def can_load(self, state: Any) -> bool:
        return isinstance(state, dict) and "progress" in state

    def load(self, state: Any) -> list[str]:
        """Keep the share of the run that was done: that of a run that ends by time is estimated anew."""
        if self.can_load(state) and self._ends_by_time:
            self._progress = state["progress"]
        return []


class SchedulerRate:
    """Learning rate by the scheduler of the workload, which counts the steps of the whole run."""

    def __init__(self, scheduler: torch.optim.lr_scheduler.LRScheduler, total: int | None) -> None:
        self._scheduler = scheduler
        self._total = total
        """Length of the run that the scheduler was made for; None if it is unknown."""
        self._step = 0
        """Steps that the scheduler has made."""

    def before_step(self, step: int) -> None:
        while self._step < step:  # More than once where other ranks have trained the steps in between.
            self._scheduler.step()
            self._step += 1

    def state(self) -> Any:
        return {"scheduler": self._scheduler.state_dict(), "steps": self._step, "total": self._total}

    def can_load(self, state: Any) -> bool:
        """Return whether the kept state is that of a scheduler for a run of the same length."""
        return isinstance(state, dict) and "scheduler" in state and state["total"] == self._total

    def load(self, state: Any) -> list[str]:
        """Load the scheduler's own state. Without one, or with that of another length, it makes all its steps again."""
        if not self.can_load(state):
            return ["the state of the scheduler, which makes its steps again, because the length of the run is another"]
        self._scheduler.load_state_dict(state["scheduler"])
        self._step = state["steps"]
        return []


def _make_scheduler(
    make: Callable[[torch.optim.Optimizer, int | None], torch.optim.lr_scheduler.LRScheduler],
    optimizer: torch.optim.Optimizer,
    total: int | None,
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the scheduler of a workload; raise if it cannot be made."""
    length = "the length of the run is unknown, so steps is None" if total is None else f"steps is {total}"
    try:
        made = make(optimizer, total)
    except Exception as error:
        raise WorkloadError(
            f"the workload's scheduler(optimizer, steps) failed: {type(error).__name__}: {error}",
            hint=f"{length}; return a scheduler of torch.optim.lr_scheduler",
        ) from None
    if not isinstance(made, torch.optim.lr_scheduler.LRScheduler):
        raise WorkloadError(
            f"the workload's scheduler(optimizer, steps) returned a {type(made).__name__}.",
            hint="return a scheduler of torch.optim.lr_scheduler",
        )
    return made


def make_learning_rate(
    workload: Workload,
    optimizer: torch.optim.Optimizer,
    steps_per_epoch: int | None,
    steps: Callable[[int], int | None],
    *,
    total: int | None,
    has_end: bool,
) -> LearningRate:
    """Return what sets the learning rate: the workload's scheduler, else its recipe.

    `steps` returns the expected length of the run at a step, and `total` is its length, None if it is not known before
    the run. `has_end` is whether the run has an end that is known, in steps or in seconds.
    """
    recipe = workload.recipe
    assert recipe is not None, "load_workload() sets the recipe"
    if workload.scheduler is not None:
        return SchedulerRate(_make_scheduler(workload.scheduler, optimizer, total), total)
    if (recipe.schedule != "constant" and not has_end) or (recipe.warmup_epochs and steps_per_epoch is None):
        what = f"the schedule {recipe.schedule}" if recipe.schedule != "constant" else "warm-up"
        raise WorkloadError(
            f"{what} needs the length of the training data, which is an iterable of unknown length.",
            hint="use --steps N with --warmup-epochs 0, or --schedule constant, or give the workload its own scheduler",
        )
    return RecipeRate(recipe, optimizer, steps_per_epoch, steps, ends_by_time=total is None)
