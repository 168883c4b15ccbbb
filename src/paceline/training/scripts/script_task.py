"""Task of a script that calls `paceline.attach`: the strategy to train under, and what to measure.

A script owns its process, so the launcher cannot pass it arguments. It sets a task in the process instead, and `attach`
reads it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.amp import GradScaler

from paceline.comm import Comm
from paceline.config import BatchNormMode, RunConfig, Script
from paceline.errors import UsageError, WorkloadError
from paceline.measure.steps import Stopwatch
from paceline.records import RunFolder
from paceline.strategies.base.strategy import MakeOptimizer, Strategy
from paceline.strategies.registry import create
from paceline.training.sync import Restored, Sync

_current_task: list[ScriptTask] = []


class ScriptFinished(SystemExit):
    """Exception that ends a script that has trained its steps; a `SystemExit`, so that its `finally` blocks run."""

    def __init__(self) -> None:
        super().__init__(0)


class TaskSync(Sync, ABC):
    """`Sync` that `attach` returns under a task: counts steps and ends the script after the last one."""

    def __init__(
        self,
        steps: int,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        strategy: Strategy,
        comm: Comm,
        bn: BatchNormMode,
    ) -> None:
        super().__init__(model, make_optimizer, strategy, comm, bn)
        self._steps = steps
        self.steps_done = 0

    @property
    def finished(self) -> bool:
        """Whether all steps of the task are done."""
        return self.steps_done == self._steps

    def step(self, max_norm: float | None = None, scaler: GradScaler | None = None) -> None:
        if self.finished:  # The script caught the first ScriptFinished.
            raise ScriptFinished
        super().step(max_norm, scaler)

    def save(self, folder: str | Path, **_: Any) -> None:
        """Do nothing: a run that is measured leaves no checkpoint that the next one would continue from."""

    def restore(self, folder: str | Path, **_: Any) -> Restored:  # noqa: ARG002
        """Return the beginning: every run that is compared starts with the same weights."""
        return Restored(0)

    def count_step(self) -> None:
        """Count a step; after the last one, write the result and end the script."""
        self.steps_done += 1
        if self.finished:
            self.write_result()
            raise ScriptFinished

    @abstractmethod
    def write_result(self) -> None:
        """Write what was measured to the record."""


@dataclass(kw_only=True)
class ScriptTask(ABC):
    """Task of a script on one rank."""

    script: Script
    config: RunConfig
    folder: RunFolder
    command: str = ""
    """Command line of the user."""
    oracle: str = ""
    """File of the oracle's gradients."""
    sync: TaskSync | None = field(default=None, init=False)
    """`Sync` that the script has attached; None before that."""
    exact_kernels: ClassVar[bool] = False
    """Whether the task needs exact, deterministic kernels rather than fast ones."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Number of steps to train before the script is ended."""

    @abstractmethod
    def make_sync(
        self, model: nn.Module, make_optimizer: MakeOptimizer, strategy: Strategy, comm: Comm, bn: BatchNormMode
    ) -> TaskSync:
        """Return the `Sync` that measures what the task needs."""

    def stopwatch(self, device: torch.device) -> Stopwatch | None:  # noqa: ARG002
        """Return the stopwatch for the script's steps; None if they are not timed."""
        return None

    def make_strategy(self) -> Strategy:
        """Return the strategy to train under."""
        return create(self.config.strategy)

    def check_attach_arguments(self, strategy: str | None, options: Mapping[str, Any]) -> None:
        """Raise if the script names a strategy or its options, or attaches a second time."""
        if strategy is not None or options:
            named = repr(strategy) if strategy is not None else ", ".join(options)
            raise UsageError(
                f"{self.script.name} passes {named} to attach(), so compare cannot choose the strategy.",
                hint="omit the strategy and its options in attach()",
            )
        if self.sync is not None:
            raise UsageError(
                f"{self.script.name} calls attach() a second time.",
                hint="attach one model per script: compare measures one model",
            )

    def attach(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        strategy: Strategy,
        comm: Comm,
        bn: BatchNormMode,
    ) -> TaskSync:
        """Return the `Sync` for the script; settings of the command line override the script's."""
        if "bn" in self.script.settings:
            bn = self.config.bn
        if "allow_unused" in self.script.settings:
            strategy.allow_unused = self.config.allow_unused
        self.sync = self.make_sync(model, make_optimizer, strategy, comm, bn)
        return self.sync

    def check_finished(self) -> None:
        """Raise if the script has ended before its task was finished."""
        if self.sync is None:
            raise WorkloadError(
                f"{self.script.name} ended without calling paceline.attach().",
                hint="train through sync = paceline.attach(model, make_optimizer), as docs/own-code.md shows",
            )
        if not self.sync.finished:
            raise WorkloadError(
                f"{self.script.name} ended after {self.sync.steps_done} of {self.steps} steps.",
                hint="train for more steps in the script, or compare with fewer --steps",
            )


def set_script_task(task: ScriptTask) -> None:
    """Set the task of the script that this process will run."""
    _current_task[:] = [task]


def script_task() -> ScriptTask | None:
    """Return the task that the launcher has set; None if the script was not started by `paceline compare`."""
    return _current_task[0] if _current_task else None
