"""Parity proof for scripts: compares their gradients under a strategy with the mean over the ranks in float64.

A script cannot be run by one process that trains all shards in turn, as Paceline's own runs can. So the oracle is the
script itself under the simplest possible strategy. The optimiser is the user's, but its `step` is replaced by one that
stores the gradients and changes nothing.

A script may change gradients between `backward()` and `sync.step()`, for example clip them by itself. Under strategies
that average in backward, as the oracle does, it changes the mean. Under strategies that average in `step`, it changes
each rank's own gradient, so their result may rightly differ from the oracle's. They are then compared with the mean of
the changed gradients, and the result says that they train differently.
"""

from __future__ import annotations

import types
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from paceline.comm import Comm
from paceline.config import BatchNormMode, ReplicaGuardMode
from paceline.errors import WorkloadError
from paceline.formatting import plural
from paceline.strategies.base.overlapped import Bucket, Overlapped, Slot
from paceline.strategies.base.strategy import MakeOptimizer, NamedParameters, Strategy
from paceline.training.parity.difference import GradientDifference, Gradients, as_vector, worst
from paceline.training.parity.oracle import TOLERANCE, clip_norm_of
from paceline.training.parity.proof import CapturedGradients, compare_gradients, parity_of
from paceline.training.parity.task import STEPS
from paceline.training.scripts.script_task import ScriptTask, TaskSync

_CHANGED_BEFORE_MEAN = (
    "{} changes gradients between backward() and sync.step(). Here the change takes effect before the average over the "
    "ranks, under ddp after it, so the two train differently. Clip with sync.step(max_norm=…), which clips the average "
    "under every strategy."
)
HALF_PRECISION_TOLERANCE = 2e-2
"""For models with gradients in bfloat16 or float16: a few units in the last place."""
MOST_SKIPPED_STEPS = 32
"""Steps that a proof waits for a GradScaler to find its scale: enough to go from 2^16, its first one, down to 2^-16."""


class ExactMean(Overlapped):
    """Mean over the ranks in float64, at the end of backward; serves as the oracle, not as a strategy to use."""

    name: ClassVar[str] = "the mean in float64"

    def wrap(self, model: nn.Module) -> nn.Module:
        self.changed = False
        """Whether the script has changed gradients between backward and `step`."""
        self._means: Gradients = {}
        return super().wrap(model)

    def copy_in(self, slot: Slot, gradient: Tensor) -> None:
        slot.view.copy_(gradient)

    def launch(self, bucket: Bucket) -> None:
        """Do nothing: `wait` sums the bucket."""

    def wait(self, bucket: Bucket) -> None:
        bucket.flat.copy_(_exact_mean(bucket.flat, self.comm))

    def _agree(self) -> None:
        super()._agree()
        self._means = {name: p.grad.clone() for name, p in self.parameters if p.grad is not None}

    def step(self, max_norm: float | None = None, scaler: GradScaler | None = None) -> None:
        if self._has_mean:
            found = {name: p.grad for name, p in self.parameters if p.grad is not None}
            is_same = found.keys() == self._means.keys() and all(
                torch.equal(found[name], mean) for name, mean in self._means.items()
            )
            self.changed = self.changed or not is_same
        super().step(max_norm, scaler)


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
        self.means_in_step: list[Gradients] = []
        """For a strategy that averages in `step`, the mean of the gradients that the script leaves to it."""
        super().__init__(STEPS, model, _with_probe_step(make_optimizer, captured), strategy, comm, bn)
        self._write_result = write_result

    def guard_replicas(self, mode: ReplicaGuardMode) -> None:
        """Compare nothing: the weights do not change."""

    def step(self, max_norm: float | None = None, scaler: GradScaler | None = None) -> None:
        clip_norm, skipped = clip_norm_of(self.steps_done, STEPS, max_norm), self.skipped_steps
        averages_now = not self.strategy.agrees_in_backward
        means = [_mean_of_gradients(self.strategy, clip_norm, scaler)] if averages_now else []
        super().step(clip_norm, scaler)
        if self.skipped_steps == skipped:  # After an overflow there is no gradient to compare: the next step counts.
            self.means_in_step += means
            self.count_step()
        elif self.skipped_steps == MOST_SKIPPED_STEPS:
            raise WorkloadError(
                f"the scaled gradients of {plural(self.skipped_steps, 'step')} were not finite.",
                hint="train the script on one rank to find the cause",
            )

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
        assert isinstance(sync.strategy, ExactMean)
        if sync.rank == 0:
            torch.save({"gradients": sync.gradients, "changed": sync.strategy.changed}, self.oracle)
            self.folder.mark_finished()


class ParityTask(ProbeTask):
    """Task that compares the strategy's gradients with those in the file."""

    def write_result(self, sync: ProbeSync) -> None:
        oracle = torch.load(Path(self.oracle), weights_only=True) if sync.rank == 0 else {}
        strategy, comm = sync.strategy, sync.comm
        tolerance = _tolerance(strategy.parameters)
        # Only rank 0's expected gradients are used.
        found = _compare(sync, oracle.get("gradients", sync.gradients), tolerance)
        caveat = ""
        is_wrong = not found.is_within(tolerance)
        if is_wrong and sync.means_in_step and comm.control.largest(oracle.get("changed", False)):
            found = _compare(sync, sync.means_in_step, tolerance)
            caveat = _CHANGED_BEFORE_MEAN.format(self.script.name)
        if sync.rank == 0:
            parity = parity_of(strategy, comm.world_size, found, tolerance, STEPS)
            self.folder.write_parity(msgspec.structs.replace(parity, caveat=caveat))
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
        hooked = torch.optim.Optimizer.profile_hook_step(keep)  # Hooks check who steps the optimiser.
        optimizer.step = types.MethodType(hooked, optimizer)  # type: ignore[method-assign]
        return optimizer

    return make


def _compare(sync: ProbeSync, expected: Sequence[Gradients], tolerance: float) -> GradientDifference:
    """Return the largest difference of the captured gradients over ranks and steps."""
    model, comm = sync.strategy.model, sync.comm
    pairs = zip(sync.gradients, expected, strict=True)
    return worst(compare_gradients(one, other, model, comm, tolerance) for one, other in pairs)


@torch.no_grad()
def _mean_of_gradients(strategy: Strategy, max_norm: float | None, scaler: GradScaler | None) -> Gradients:
    """Return the mean over the ranks of the current gradients, unscaled and clipped as `Strategy.update` does it."""
    comm, parameters = strategy.comm, strategy.parameters
    used = comm.control.any_of(torch.tensor([p.grad is not None for _, p in parameters], dtype=torch.uint8)).tolist()
    means: Gradients = {}
    for (name, p), is_used in zip(parameters, used, strict=True):
        if is_used:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            means[name] = _exact_mean(gradient, comm) / (1.0 if scaler is None else scaler.get_scale())
    if max_norm is not None:
        norm = nn.utils.get_total_norm(list(means.values()))
        torch._foreach_mul_(list(means.values()), float(torch.clamp(max_norm / (norm + 1e-6), max=1.0)))
    return means


def _exact_mean(values: Tensor, comm: Comm) -> Tensor:
    mean = comm.control.sum(as_vector(values).clone()) / comm.world_size  # `sum` works in place.
    return (torch.view_as_complex(mean.view(-1, 2)) if values.is_complex() else mean).view(values.shape)


def _tolerance(parameters: NamedParameters) -> float:
    """Return the tolerance for the least precise dtype of the parameters."""
    return max(TOLERANCE.get(parameter.dtype.to_real(), HALF_PRECISION_TOLERANCE) for _, parameter in parameters)
