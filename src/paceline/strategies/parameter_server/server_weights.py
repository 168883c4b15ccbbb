"""The weights of a server that steps by each gradient as it comes: a lock keeps its threads from doing so at once."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm.packed_tensors import PackedTensors
from paceline.errors import RankError
from paceline.strategies.base.strategy import NamedParameters, copies
from paceline.strategies.parameter_server.optimizer_settings import OptimizerSettings
from paceline.strategies.parameter_server.staleness import Staleness, StalenessBound
from paceline.strategies.parameter_server.synchronous import kept_for


class ServerReply(NamedTuple):
    """What comes with weights."""

    version: int
    """How many updates they have had."""
    ticket: int
    """Which share of which step the worker shall train next; the first server's alone counts."""
    failed: bool = False
    """The server has failed, or has lost a worker: the weights say nothing."""


class ServerWeights:
    """The weights of one server, and all that is done with them."""

    def __init__(
        self,
        named: NamedParameters,
        optimizer: torch.optim.Optimizer,
        workers: int,
        bound: StalenessBound,
        first_ticket: int,
    ) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.optimizer = optimizer
        self.settings = OptimizerSettings(optimizer)
        self.staleness = Staleness()
        self.failure: Exception | None = None
        """Why the weights say nothing any more."""
        self.has_failed = threading.Event()
        self._workers = workers
        self._bound = bound
        self._version = 0
        self._ticket = first_ticket
        self._lock = threading.Lock()

    def push(
        self,
        gradients: Sequence[Tensor],
        used: Sequence[bool],
        settings: Sequence[float],
        version: int,
        into: PackedTensors,
    ) -> ServerReply:
        """Steps by one worker's gradients, and packs the weights that come of it.

        Each is a share of a global batch, so it is stepped at 1 ÷ workers of the learning rate: that many updates go as
        far as one step of all, weight decay and optimisers that pass over a gradient's size included.
        """
        with self._lock:
            staleness = self._version - version
            self.staleness.counts[staleness] += 1
            factor = self._bound.factor(staleness)
            if factor:
                self.staleness.damped += factor < 1
                self._try_to_step(gradients, used, settings, factor)
            else:
                self.staleness.dropped += 1
            ticket, self._ticket = self._ticket, self._ticket + 1
            return self._give(into, ticket)

    def pull(self, into: PackedTensors) -> ServerReply:
        """Packs the weights as they are."""
        with self._lock:
            return self._give(into, -1)

    def load(self, weights: Sequence[Tensor], kept: Mapping[str, dict[str, Any]]) -> None:
        """Goes on from other weights, and from what another optimiser has kept."""
        with self._lock, torch.no_grad():
            torch._foreach_copy_([parameter.detach() for parameter in self.parameters], list(weights))
            for name, parameter in zip(self.names, self.parameters, strict=True):
                self.optimizer.state[parameter] = copies(kept.get(name, {}))

    def state(self) -> dict[str, dict[str, Any]]:
        """What the optimiser keeps."""
        with self._lock:
            return kept_for(self.names, self.parameters, self.optimizer)

    def _give(self, into: PackedTensors, ticket: int) -> ServerReply:
        into.pack([parameter.detach() for parameter in self.parameters])
        return ServerReply(self._version, ticket, failed=self.failure is not None)

    def _try_to_step(
        self, gradients: Sequence[Tensor], used: Sequence[bool], settings: Sequence[float], factor: float
    ) -> None:
        """Steps; where that fails, whoever asks gets to know it, and the rank that it happens on raises it."""
        try:
            self._step(gradients, used, settings, factor)
        except Exception as error:
            self.fail(error)

    def fail(self, failure: Exception) -> None:
        """Has whoever asks get to know that it has failed; the first reason counts."""
        self.failure = self.failure or failure
        self.has_failed.set()

    def why(self) -> dict[str, Any]:
        """Why it has failed, in words that can be sent."""
        assert self.failure is not None
        known = isinstance(self.failure, RankError)
        return {
            "reason": str(self.failure) if known else f"{type(self.failure).__name__}: {self.failure}",
            "detail": None if known else "".join(traceback.format_exception(self.failure)).rstrip(),
            "peer_lost": isinstance(self.failure, RankError) and self.failure.peer_lost,
        }

    def _step(
        self, gradients: Sequence[Tensor], used: Sequence[bool], settings: Sequence[float], factor: float
    ) -> None:
        if factor < 1 and gradients:  # By the gradient and not the rate: that momentum keeps it so.
            torch._foreach_mul_(list(gradients), factor)
        for parameter, gradient, there in zip(self.parameters, gradients, used, strict=True):
            parameter.grad = gradient if there else None
        self.settings.write(settings, self._workers)
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        self._version += 1
