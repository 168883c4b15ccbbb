"""Parity proof for scripts: compares their gradients under a strategy with the mean over the ranks in float64.

A script cannot be run by one process that trains all shards in turn, as Paceline's own runs can. So the oracle is the
script itself under the simplest possible strategy. The optimiser is the user's, but its `step` is replaced by one that
stores the gradients and changes nothing.
"""

from __future__ import annotations

import types
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from paceline.comm import Comm
from paceline.config import BatchNormMode, ReplicaGuardMode
from paceline.records.parity import Parity
from paceline.strategies.base.strategy import AfterBackward, MakeOptimizer, NamedParameters, Strategy
from paceline.training.parity.oracle import TOLERANCE, clip_norm_of
from paceline.training.parity.proof import CapturedGradients, compare_gradients, worst
from paceline.training.parity.task import STEPS
from paceline.training.scripts.script_task import ScriptTask, TaskSync

HALF_PRECISION_TOLERANCE = 2e-2
"""For models with gradients in bfloat16 or float16: a few units in the last place."""


class ExactMean(AfterBackward):
    """Mean over the ranks in float64, one gradient after the other; serves as the oracle, not as a strategy to use."""

    name: ClassVar[str] = "the mean in float64"

    def agree(self, gradients: Sequence[Tensor]) -> None:
        for gradient in gradients:
            gradient.copy_(self.comm.control.sum(gradient.double().cpu()) / self.comm.world_size)


class ProbeSync(TaskSync):
    """`Sync` that stores the gradients of each step and does not change the weights."""

    def __init__(
        self,
        write_result: Callable[[ProbeSync], None],
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        strategy: Strategy,
        comm: Comm,
        bn: BatchNormMode,
    ) -> None:
        captured = CapturedGradients(strategy)
        self.gradients = captured.steps
        super().__init__(STEPS, model, _with_probe_step(make_optimizer, captured), strategy, comm, bn)
        self._write_result = write_result

    def guard_replicas(self, mode: ReplicaGuardMode) -> None:
        """Compare nothing: the weights do not change."""

    def step(self, max_norm: float | None = None, scaler: GradScaler | None = None) -> None:
        super().step(clip_norm_of(self.steps_done, STEPS, max_norm), scaler)
        self.count_step()

    def write_result(self) -> None:
        self.strategy.finish()
        self._write_result(self)


class ProbeTask(ScriptTask):
    """Task that captures the gradients of a few steps; subclasses use them."""

    steps = STEPS
    exact_kernels = True

    def make_sync(
        self, model: nn.Module, make_optimizer: MakeOptimizer, strategy: Strategy, comm: Comm, bn: BatchNormMode
    ) -> TaskSync:
        return ProbeSync(self.write_result, model, make_optimizer, strategy, comm, bn)

    @abstractmethod
    def write_result(self, sync: ProbeSync) -> None:
        """Write or compare the gradients; called on every rank."""


class OracleTask(ProbeTask):
    """Task that writes the oracle's gradients to a file."""

    def make_strategy(self) -> Strategy:
        return ExactMean()

    def write_result(self, sync: ProbeSync) -> None:
        if sync.rank == 0:
            torch.save(sync.gradients, self.oracle)
            self.folder.mark_finished()


class ParityTask(ProbeTask):
    """Task that compares the strategy's gradients with those in the file."""

    def write_result(self, sync: ProbeSync) -> None:
        # Only rank 0's expected gradients are used.
        expected = torch.load(Path(self.oracle), weights_only=True) if sync.rank == 0 else sync.gradients
        model, comm = sync.strategy.model, sync.comm
        pairs = zip(sync.gradients, expected, strict=True)
        found = worst(compare_gradients(one, other, model, comm) for one, other in pairs)
        strategy, tolerance = sync.strategy, _tolerance(sync.strategy.parameters)
        if sync.rank == 0:
            parity = Parity(strategy.name, comm.world_size, *found, tolerance, strategy.lossless, STEPS)
            self.folder.write_parity(parity)
            self.folder.mark_finished()


class OracleCheckTask(ParityTask):
    """Task that compares the oracle's gradients with those of an earlier run: do they repeat?"""

    def make_strategy(self) -> Strategy:
        return ExactMean()


def _with_probe_step(make_optimizer: MakeOptimizer, captured: CapturedGradients) -> MakeOptimizer:
    """Create the user's optimiser and replace its `step`, by a bound method, since schedulers wrap that."""

    def make(parameters: NamedParameters) -> torch.optim.Optimizer:
        def keep(_: torch.optim.Optimizer, closure: Any = None) -> None:  # noqa: ARG001  (as optimisers have it)
            captured.add({name: p.grad.detach().clone() for name, p in parameters if p.grad is not None})

        optimizer = make_optimizer(parameters)
        optimizer.step = types.MethodType(keep, optimizer)  # type: ignore[method-assign]
        return optimizer

    return make


def _tolerance(parameters: NamedParameters) -> float:
    """Return the tolerance for the least precise dtype of the parameters."""
    return max(TOLERANCE.get(parameter.dtype, HALF_PRECISION_TOLERANCE) for _, parameter in parameters)
