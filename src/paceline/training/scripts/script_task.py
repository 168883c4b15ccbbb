"""What a launcher asks of a script that calls `paceline.attach`: under which strategy to train, and what to find out.

Such a script owns its process, so the launcher can hand it nothing. It leaves an task, which `attach` finds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from paceline.comm import Comm
from paceline.config import BatchNormMode, RunConfig, Script
from paceline.errors import UsageError, WorkloadError
from paceline.measure.steps import Stopwatch
from paceline.records import RunFolder
from paceline.strategies.base.strategy import MakeOptimizer, Strategy
from paceline.strategies.registry import create
from paceline.training.sync import Sync

_current_task: list[ScriptTask] = []


class ScriptFinished(SystemExit):
    """Leaves a script that has trained the steps asked for. A `SystemExit`, so that its `finally` blocks run."""

    def __init__(self) -> None:
        super().__init__(0)


class TaskSync(Sync, ABC):
    """What `attach` returns under an task: it counts steps, and leaves the script after the last."""

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
        """Whether it has done all that was asked."""
        return self.steps_done == self._steps

    def step(self, max_norm: float | None = None) -> None:
        if self.finished:  # The script held the first attempt to leave it up.
            raise ScriptFinished
        super().step(max_norm)

    def count_step(self) -> None:
        """Ends a step; the last one ends the script."""
        self.steps_done += 1
        if self.finished:
            self.write_result()
            raise ScriptFinished

    @abstractmethod
    def write_result(self) -> None:
        """Writes down what was found out."""


@dataclass(kw_only=True)
class ScriptTask(ABC):
    """What one rank's script is to do."""

    script: Script
    config: RunConfig
    folder: RunFolder
    command: str = ""
    """What the user typed."""
    oracle: str = ""
    """The file of the gradients that proofs compare with."""
    sync: TaskSync | None = field(default=None, init=False)
    """What the script attached."""
    exact_kernels: ClassVar[bool] = False
    """Whether rounding matters more than speed."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """After how many steps the script has done enough."""

    @abstractmethod
    def make_sync(
        self, model: nn.Module, make_optimizer: MakeOptimizer, strategy: Strategy, comm: Comm, bn: BatchNormMode
    ) -> TaskSync:
        """A `Sync` that finds out what is asked for."""

    def stopwatch(self, device: torch.device) -> Stopwatch | None:  # noqa: ARG002
        """What times the script's steps, where that is asked for."""
        return None

    def make_strategy(self) -> Strategy:
        """The strategy to train under."""
        return create(self.config.strategy)

    def check_attach_arguments(self, strategy: str | None, options: Mapping[str, Any]) -> None:
        """Refuses a script that leaves nothing to choose, or that attaches twice."""
        if strategy is not None or options:
            named = repr(strategy) if strategy is not None else ", ".join(options)
            raise UsageError(
                f"{self.script.name} gives {named} to attach(), which leaves nothing to compare.",
                hint="leave the strategy and its options out of attach(), so that compare can choose it",
            )
        if self.sync is not None:
            raise UsageError(
                f"{self.script.name} calls attach() a second time.", hint="compare takes scripts that train one model"
            )

    def attach(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        strategy: Strategy,
        comm: Comm,
        bn: BatchNormMode,
    ) -> TaskSync:
        """What the script gets; the launcher's settings win over its own."""
        if "bn" in self.script.settings:
            bn = self.config.bn
        if "allow_unused" in self.script.settings:
            strategy.allow_unused = self.config.allow_unused
        self.sync = self.make_sync(model, make_optimizer, strategy, comm, bn)
        return self.sync

    def check_finished(self) -> None:
        """Refuses a script that came to its end without doing what was asked."""
        if self.sync is None:
            raise WorkloadError(
                f"{self.script.name} ended without a call of paceline.attach().",
                hint="train through sync = paceline.attach(model, make_optimizer), as docs/own-code.md shows",
            )
        if not self.sync.finished:
            raise WorkloadError(
                f"{self.script.name} ended after {self.sync.steps_done} of {self.steps} steps.",
                hint="let it train longer, or compare fewer --steps",
            )


def set_script_task(task: ScriptTask) -> None:
    """Leaves it for the script that this process will run."""
    _current_task[:] = [task]


def script_task() -> ScriptTask | None:
    """What the launcher left, if a launcher of ours runs this script."""
    return _current_task[0] if _current_task else None
