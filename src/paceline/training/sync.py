"""Combination of a model, an optimiser and a strategy, used by Paceline's loop and by a user's loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from paceline.comm.group import Comm, close_comm
from paceline.comm.messages.payload import PayloadCount
from paceline.comm.untracked_traffic import UntrackedTraffic
from paceline.config import BatchNormMode, NoiseScaleMode, ReplicaGuardMode
from paceline.errors import UsageError, is_peer_lost
from paceline.records.summary import UntrackedCounts
from paceline.strategies.base.abilities import GivesTickets
from paceline.strategies.base.scaling import checked_scaler, scaler_argument, skipped_steps
from paceline.strategies.base.strategy import MakeOptimizer, NamedParameters, Strategy
from paceline.strategies.base.uncopied_hook import UncopiedHook
from paceline.training.batchnorm import UpdatedBuffers, sync_batchnorm
from paceline.training.checks.attach_arguments import check_optimizer
from paceline.training.checks.loop import LoopChecks, watch_optimizers
from paceline.training.gradient_noise import NoiseSampler
from paceline.training.replicas.guard import ReplicaGuard


class Restored(NamedTuple):
    """Result of `Sync.restore`."""

    step: int
    """Steps done when the checkpoint was saved; 0 if there is none."""
    extra: Any = None
    """Value that was saved as `extra`."""


class Sync:
    """Model that is trained under a strategy.

        sync = paceline.attach(model, make_optimizer, "ddp")
        loss_fn(sync.model(x), y).backward()
        sync.step()

    `step(max_norm=1.0)` clips gradients; `step(scaler=scaler)` unscales them, for training in float16. `with
    sync.accumulate():` around forward and backward skips synchronisation. Call `close()` at the end, or use the object
    as a context manager.
    """

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, strategy: Strategy, comm: Comm, bn: BatchNormMode
    ) -> None:
        self.strategy = strategy
        self.comm = comm
        self.steps = 0
        """Number of steps made, also those before the checkpoint that `restore` has loaded."""
        self.skipped_steps = 0
        """Number of steps that were skipped after an overflow of scaled gradients."""
        self._undo = ExitStack()
        self._on_close = ExitStack()
        self._is_closed = False
        if bn == "sync" and not strategy.lockstep:
            raise sync_batchnorm_unsupported(strategy)
        self.uses_sync_batchnorm = bn == "sync" and comm.world_size > 1
        """Whether BatchNorm layers exchange statistics in every forward and backward pass."""
        if self.uses_sync_batchnorm:
            self._undo.enter_context(sync_batchnorm(model, comm))
        self.guard: ReplicaGuard | None = None
        """Comparisons of the replicas; None without `guard_replicas`, and where no replicas should be equal."""
        self.noise = NoiseSampler("off", strategy, comm.world_size, 1)
        """Measurement of gradient noise; does nothing without `measure_noise`."""
        self._untracked = UntrackedTraffic()
        self.payload = PayloadCount(comm) if comm.is_timed else None
        """Counter of the bytes that sockets carry, read from the kernel; None without timing."""
        watch_optimizers()  # Before the strategy starts servers.
        try:
            attached = strategy.attach(model, self._checked(make_optimizer, model), comm)
        except BaseException:
            self._undo.close()
            raise
        self.model: nn.Module = attached
        """Module to call in the forward pass."""
        try:
            self._watch(model, bn)
        except BaseException:
            self._abandon()
            raise

    def _watch(self, model: nn.Module, bn: BatchNormMode) -> None:
        """Add what checks the loop, times its gradients and keeps its buffers equal."""
        strategy, comm = self.strategy, self.comm
        self._checks = LoopChecks(model, self.model, strategy)
        self._undo.callback(self._checks.close)
        if comm.stopwatch is not None:
            self._undo.callback(comm.stopwatch.watch_gradients(p for p in model.parameters() if p.requires_grad))
        self.buffers = UpdatedBuffers(model, comm)
        self._buffers_outdated = False
        self._has_called_model = False
        """Whether the whole model was called, in training mode, since the last step."""
        self._broadcasts_buffers = False
        waits = strategy.exchanges and strategy.lockstep and comm.world_size > 1
        if bn == "broadcast" and waits and self.buffers.may_exist:
            self._broadcasts_buffers = True
            self._undo.callback(model.register_forward_pre_hook(UncopiedHook(self._refresh_buffers)).remove)

    def guard_replicas(self, mode: ReplicaGuardMode) -> None:
        """Compare the replicas while training, under a strategy that promises that they are equal."""
        if mode != "off" and self.strategy.exchanges and self.comm.world_size > 1:
            self.guard = ReplicaGuard(mode, self.strategy, self.comm, compare_statistics=self.uses_sync_batchnorm)

    def measure_noise(self, mode: NoiseScaleMode, micro_batches: int) -> None:
        """Measure gradient noise while training, in steps of so many micro-batches on each rank."""
        self.noise = NoiseSampler(mode, self.strategy, self.ranks, micro_batches)
        self._undo.callback(self.noise.close)

    @property
    def rank(self) -> int:
        """This rank's number among the workers."""
        return self.comm.rank

    @property
    def ranks(self) -> int:
        """Number of workers."""
        return self.comm.world_size

    @property
    def ticket(self) -> int:
        """Share of the data that this rank trains next, as step × ranks + share, where ranks do not step together.

        Each number is given to exactly one rank, in increasing order.
        """
        if self.strategy.lockstep or not isinstance(self.strategy, GivesTickets):
            reason = "all ranks step together" if self.strategy.lockstep else "it has no method `next_ticket`"
            raise UsageError(
                f"{self.strategy.name} has no tickets: {reason}.",
                hint="train this rank's own share of every step",
            )
        return self.strategy.next_ticket()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimiser that this rank steps; learning-rate schedulers attach to it."""
        return self.strategy.optimizer

    @property
    def broadcast_bytes(self) -> list[int]:
        """Bytes of each message that rank 0 broadcasts before a step: the known updated buffers."""
        return self.buffers.message_bytes if self._broadcasts_buffers else []

    def untracked(self) -> UntrackedCounts | None:
        """Return the traffic outside the timed process groups, None without timing; called on every rank."""
        return self._untracked.untracked(self.comm) if self.comm.is_timed else None

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context for forward and backward of one micro-batch."""
        return self.strategy.microbatch(last)

    def accumulate(self) -> AbstractContextManager[Any]:
        """Return the context for forward and backward of every micro-batch except the last."""
        self._check_open()
        return self.strategy.microbatch(last=False)

    def step(self, max_norm: float | None = None, scaler: GradScaler | None = None) -> None:
        """Synchronise gradients, unscale and clip them, step the optimiser, clear the gradients.

        With a scaler, all ranks skip the step together after an overflow, and the scale is updated. Do not call the
        scaler's own `unscale_`, `step` and `update`, and create one scaler for each sync.
        """
        self._check_open()
        _check_max_norm(max_norm)
        scaler = checked_scaler(scaler, self.strategy)
        before = skipped_steps(scaler)
        with self._explaining_waits("sync.step()"):
            with self._checks:
                self.strategy.step(max_norm, **scaler_argument(scaler))
            self.steps += 1
            self.skipped_steps += skipped_steps(scaler) - before
            self._buffers_outdated = True
            if self._broadcasts_buffers and not self._has_called_model:
                self._broadcast_buffers()  # The loop calls only parts of the model, so no hook will do it.
            self._has_called_model = False
            if self.guard is not None:
                self.guard.after_step()

    def trial_step(self, max_norm: float | None = None) -> None:
        """Make a step that does not count, because the caller restores weights and buffers afterwards."""
        with self._checks:
            self.strategy.step(max_norm)
        self._buffers_outdated = True

    def note(
        self,
        *,
        loss: Tensor | float | None = None,
        samples: int | None = None,
        correct: Tensor | int | None = None,
    ) -> None:
        """Report a step's loss, samples and correct predictions to `paceline compare --script`, before `step()`.

        Elsewhere it does nothing. The loss is the mean over the samples of this rank (or micro-batch), without weights.
        Tensors are read later, between steps, so a call never waits for a GPU. Without calls, a comparison has times
        but no losses, and takes the first dimension of the first tensor passed to `sync.model` as the number of
        samples.
        """

    def weight(self, samples: int, batch: int) -> float:
        """Return the factor for the mean loss over `samples` of a global batch that makes the mean over ranks exact."""
        return samples * self.ranks / batch

    def mean(self, value: float, samples: int = 1) -> float:
        """Return the mean of a value over the ranks, weighted by their samples; called on every rank."""
        self._check_open()
        with self._explaining_waits("sync.mean()"):
            total, count = self.comm.control.sum(torch.tensor([value * samples, samples], dtype=torch.float64)).tolist()
        return float(total / count)

    @contextmanager
    def agreed(self) -> Iterator[nn.Module]:
        """Yield the model with the agreed weights and buffers, the result of the run, on every rank."""
        self._check_open()
        if self.payload is not None:
            self.payload.discard_window()
        with ExitStack() as entered:
            with self._explaining_waits("sync.agreed()"):
                model = entered.enter_context(self.strategy.agreed())
                if self.guard is not None:
                    self.guard.in_agreed(model)
                entered.enter_context(self.buffers.agreed())
            entered.enter_context(self._checks.agreed())
            yield model

    def save(
        self, folder: str | Path, *, scheduler: Any = None, scaler: Any = None, extra: Any = None, keep: int = 2
    ) -> None:
        """Write a checkpoint to a folder, of which the last `keep` stay there; called on every rank between two steps.

        It keeps the weights, the optimiser, what the strategy needs, the random numbers of every rank, the number of
        steps, the states of a learning-rate scheduler and of a GradScaler, and `extra`: any value of tensors, numbers,
        texts, lists and dicts, such as the epoch and the position in the data. Rank 0 writes it, and returns when it
        is on disk.
        """
        from paceline.training.checkpoints.own_loop import save

        self._check_open()
        with self._explaining_waits("sync.save()"):
            save(self, Path(folder), scheduler=scheduler, scaler=scaler, extra=extra, keep=keep)

    def restore(self, folder: str | Path, *, scheduler: Any = None, scaler: Any = None) -> Restored:
        """Continue from the newest valid checkpoint of a folder; called on every rank before the first step.

        The number of ranks and the strategy may be others than when it was saved. Return the number of steps done and
        the value of `extra`: 0 and None if the folder has no checkpoint.
        """
        from paceline.training.checkpoints.own_loop import restore

        self._check_open()
        with self._explaining_waits("sync.restore()"):
            return restore(self, Path(folder), scheduler=scheduler, scaler=scaler)

    def detach(self) -> None:
        """Remove everything that was added to the model; its weights stay trained."""
        self._is_closed = True
        self._undo.close()
        self.strategy.close()

    def on_close(self, call: Callable[[], None]) -> None:
        """Register a function that `close` calls last."""
        self._on_close.callback(call)

    def close(self) -> None:
        """Detach from the model and close the process groups."""
        guard, self.guard = self.guard, None
        try:
            if guard is not None:
                guard.at_close()
        finally:  # The guard raises on all ranks alike, so they can still close in order.
            self.detach()
            close_comm(self.comm)
            self._on_close.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        # After an error other ranks may be blocked in an operation; an orderly close would wait for them.
        if kind is None:
            self.close()
        else:
            self._abandon()

    def _abandon(self) -> None:
        """Detach after an error without waiting for other ranks. Groups stay open: operations may be in progress."""
        self._is_closed = True
        self.guard = None  # A later `close` has nothing to compare: the strategy has left its model.
        self._undo.close()
        self.strategy.abandon()

    @contextmanager
    def _explaining_waits(self, call: str) -> Iterator[None]:
        """Add a hint to an error of torch that means that other ranks did not take part."""
        try:
            yield
        except RuntimeError as error:
            if is_peer_lost(error):
                error.add_note(
                    f"hint: rank {self.rank} waited in {call} for another rank; all ranks must make the same number of "
                    "steps, and the same calls of sync.mean and sync.agreed (see also the output of the other ranks)"
                )
            raise

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError(
                f"the model is no longer attached to {self.strategy.name}: close() was called.",
                hint="call close() last, or attach() again; the model itself can still be called and saved",
            )

    def _checked(self, make_optimizer: MakeOptimizer, model: nn.Module) -> MakeOptimizer:
        """Check the optimisers that are created, and mark the start of their steps on the stopwatch, by a hook."""

        stopwatch = self.comm.stopwatch if self.comm.is_timed else None

        def make(parameters: NamedParameters) -> torch.optim.Optimizer:
            optimizer = make_optimizer(parameters)
            check_optimizer(optimizer, parameters, model)
            if stopwatch is not None:
                hook = optimizer.register_step_pre_hook(lambda *_: stopwatch.mark_agreed())
                self._undo.callback(hook.remove)
            return optimizer

        return make

    def _refresh_buffers(self, module: nn.Module, _: Any) -> None:
        if module.training:
            self._uncompiled_refresh()

    # Compiled models call the hook as it is.
    _refresh_buffers._torchdynamo_disable = True  # type: ignore[attr-defined]

    @cached_property
    def _uncompiled_refresh(self) -> Callable[[], None]:
        """Function that refreshes buffers, and that torch.compile leaves alone with all that it calls."""
        if "torch._dynamo" not in sys.modules:  # Nothing is compiled, and importing it takes a second.
            return self.refresh_buffers
        uncompiled: Callable[[], None] = torch.compiler.disable(self.refresh_buffers)
        return uncompiled

    def refresh_buffers(self) -> None:
        """Broadcast the buffers that the last step has changed, as a call of the model does in training.

        A loop that replays the forward pass from a CUDA graph calls it before, since no hooks run then.
        """
        self._has_called_model = True
        if self._broadcasts_buffers and self._buffers_outdated:
            self._broadcast_buffers()

    @contextmanager
    def local_passes(self) -> Iterator[None]:
        """Let passes of the model inside the `with` block exchange nothing: buffers stay those of this rank."""
        before = self._broadcasts_buffers, self._has_called_model
        self._broadcasts_buffers = False
        try:
            yield
        finally:
            self._broadcasts_buffers, self._has_called_model = before

    def _broadcast_buffers(self) -> None:
        self.buffers.broadcast()
        self._buffers_outdated = False


def _check_max_norm(max_norm: object) -> None:
    """Raise a UsageError unless it is None or a positive number: torch's clipping reverses gradients if negative."""
    if max_norm is None:
        return
    if not isinstance(max_norm, int | float | Tensor):
        raise UsageError(
            f"step() got an object of type {type(max_norm).__name__} as max_norm.",
            hint="pass a number; strategies cannot call a closure, as LBFGS needs it",
        )
    if not max_norm > 0:
        raise UsageError(f"max_norm is {float(max_norm)}.", hint="pass a number that is more than 0")


def sync_batchnorm_unsupported(strategy: Strategy) -> UsageError:
    """Return the error for `--bn sync` under a strategy whose ranks do not step together."""
    return UsageError(
        f"--bn sync needs ranks that step together, but under {strategy.name} ranks do not wait for each other.",
        hint="use --bn local; under this strategy --bn broadcast does the same",
    )
