"""Joins a model, an optimiser and a strategy: what both Paceline's loop and a user's own loop train through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from paceline.comm.group import Comm, close_comm
from paceline.comm.payload import PayloadCount
from paceline.comm.untracked_traffic import UntrackedTraffic
from paceline.config import BatchNormMode
from paceline.errors import UsageError
from paceline.strategies.base.strategy import MakeOptimizer, NamedParameters, Strategy
from paceline.training.batchnorm import UpdatedBuffers, sync_batchnorm


class Sync:
    """A model under a strategy.

        sync = paceline.attach(model, make_optimizer, "ddp")
        loss_fn(sync.model(x), y).backward()
        sync.step()

    `step(max_norm=1.0)` clips; `with sync.accumulate():` around forward and backward holds synchronisation back. It is
    closed by `close()`, or by leaving a `with` around it.
    """

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, strategy: Strategy, comm: Comm, bn: BatchNormMode
    ) -> None:
        self.strategy = strategy
        self.comm = comm
        self._undo = ExitStack()
        self._on_close = ExitStack()
        if bn == "sync" and not strategy.lockstep:
            raise sync_batchnorm_unsupported(strategy)
        self.uses_sync_batchnorm = bn == "sync" and comm.world_size > 1
        """Whether BatchNorm layers send messages of their own."""
        if self.uses_sync_batchnorm:
            self._undo.enter_context(sync_batchnorm(model, comm))
        self._untracked = UntrackedTraffic()
        self.payload = PayloadCount(comm) if comm.is_timed else None
        """What the sockets carry, by the kernel's count; None where nothing is noted."""
        self.model: nn.Module = strategy.attach(model, self._with_step_mark(make_optimizer), comm)
        """The module to call."""
        if comm.stopwatch is not None:
            self._undo.callback(comm.stopwatch.watch_gradients(p for p in model.parameters() if p.requires_grad))
        self.buffers = UpdatedBuffers(model, comm)
        self._buffers_outdated = False
        self._broadcasts_buffers = False
        waits = strategy.exchanges and strategy.lockstep and comm.world_size > 1
        if bn == "broadcast" and waits and self.buffers.may_exist:
            self._broadcasts_buffers = True
            self._undo.callback(model.register_forward_pre_hook(self._refresh_buffers).remove)

    @property
    def rank(self) -> int:
        """This rank, among those that take part."""
        return self.comm.rank

    @property
    def ranks(self) -> int:
        """How many take part."""
        return self.comm.world_size

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What this rank steps; learning-rate schedulers attach to it."""
        return self.strategy.optimizer

    @property
    def broadcast_bytes(self) -> list[int]:
        """The bytes of each message that rank 0 broadcasts before a step: buffers that training changes, as known."""
        return self.buffers.message_bytes if self._broadcasts_buffers else []

    def untracked(self) -> dict[str, int] | None:
        """How much passed by the groups that are timed; None where none are. Every rank calls it."""
        return self._untracked.untracked(self.comm) if self.comm.is_timed else None

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        """Goes around forward and backward of one micro-batch."""
        return self.strategy.microbatch(last)

    def accumulate(self) -> AbstractContextManager[Any]:
        """Goes around forward and backward of every micro-batch but the last."""
        return self.strategy.microbatch(last=False)

    def step(self, max_norm: float | None = None) -> None:
        """Agrees on gradients, clips, steps the optimiser, clears the gradients."""
        self.strategy.step(max_norm)
        self._buffers_outdated = True

    def note(
        self,
        *,
        loss: Tensor | float | None = None,
        samples: int | None = None,
        correct: Tensor | int | None = None,
    ) -> None:
        """Tells `paceline compare --script` of a step, before its `step()`; elsewhere it does nothing.

        The loss is the mean over the samples of this rank (or micro-batch), before any weight. Tensors are read later,
        between steps, so telling costs no wait for a GPU. Without it, a comparison has times but no losses, and counts
        as samples the first dimension of the first tensor that `sync.model` is given.
        """

    def weight(self, samples: int, batch: int) -> float:
        """The factor for the mean loss of some samples of a global batch; plain averaging over ranks is then exact."""
        return samples * self.ranks / batch

    def mean(self, value: float, samples: int = 1) -> float:
        """The mean of a figure over the ranks, weighted by their samples. Every rank calls it."""
        total, count = self.comm.sum(torch.tensor([value * samples, samples], dtype=torch.float64)).tolist()
        return float(total / count)

    @contextmanager
    def agreed(self) -> Iterator[nn.Module]:
        """The model with the weights and buffers that the run would ship, on every rank."""
        if self.payload is not None:
            self.payload.disturb()
        with self.strategy.agreed() as model, self.buffers.agreed():
            yield model

    def detach(self) -> None:
        """Leaves the model as it was found, but for its weights."""
        self._undo.close()
        self.strategy.close()

    def on_close(self, call: Callable[[], None]) -> None:
        """Has something done at the very end of `close`."""
        self._on_close.callback(call)

    def close(self) -> None:
        """Detaches, and ends the groups."""
        self.detach()
        close_comm(self.comm)
        self._on_close.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        # After an error the other ranks may wait in an operation; ending the groups in order would wait for them.
        if kind is None:
            self.close()
        else:
            self._undo.close()
            self.strategy.abandon()

    def _with_step_mark(self, make_optimizer: MakeOptimizer) -> MakeOptimizer:
        """Has the optimiser itself say when it starts: a strategy with a `step` of its own need not."""

        def make(parameters: NamedParameters) -> torch.optim.Optimizer:
            optimizer = make_optimizer(parameters)
            if self.comm.is_timed and isinstance(optimizer, torch.optim.Optimizer):
                hook = optimizer.register_step_pre_hook(lambda *_: self.comm.agreed())
                self._undo.callback(hook.remove)
            return optimizer

        return make

    def _refresh_buffers(self, module: nn.Module, _: Any) -> None:
        if self._buffers_outdated and module.training:
            self.buffers.broadcast()
            self._buffers_outdated = False


def sync_batchnorm_unsupported(strategy: Strategy) -> UsageError:
    """The error for BatchNorm over all ranks where these do not step together."""
    return UsageError(
        f"--bn sync has ranks wait for each other in every layer, and under {strategy.name} none waits for another.",
        hint="use --bn local, which --bn broadcast is here too",
    )
