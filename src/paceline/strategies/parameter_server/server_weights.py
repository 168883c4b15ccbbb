"""Weights of an asynchronous server, which steps with each gradient when it arrives; a lock protects them."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm.packed_tensors import PackedTensors
from paceline.errors import RankError
from paceline.strategies.base.strategy import NamedParameters, clone_tensors
from paceline.strategies.parameter_server.optimizer_settings import OptimizerSettings
from paceline.strategies.parameter_server.server_shard import optimizer_state_of
from paceline.strategies.parameter_server.staleness import Staleness, StalenessBound


class ServerReply(NamedTuple):
    """Reply of a server, sent with the weights."""

    version: int
    """Number of updates in the weights."""
    ticket: int
    """Share of the data that the worker trains next; only the first server's ticket is used."""
    failed: bool = False
    """Whether the server has failed or lost a worker; the weights are then not valid."""


class ServerWeights:
    """Weights of one asynchronous server, with its optimiser; safe to use from several threads."""

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
        """First error of the server, after which the weights are not valid; None without an error."""
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
        """Step with one worker's gradients, and pack the new weights into `into`.

        The gradients are those of one share of a global batch, so the learning rate is divided by the number of
        workers. This way, one update per worker changes the weights as much as one synchronous step, also with weight
        decay and with optimisers that normalise gradients.
        """
        with self._lock:
            staleness = self._version - version
            self.staleness.counts[staleness] += 1
            factor = self._bound.factor(staleness)
            if factor:
                self.staleness.damped += factor < 1
                self._step_or_fail(gradients, used, settings, factor)
            else:
                self.staleness.dropped += 1
            ticket, self._ticket = self._ticket, self._ticket + 1
            return self._pack_reply(into, ticket)

    def pull(self, into: PackedTensors) -> ServerReply:
        """Pack the current weights into `into`."""
        with self._lock:
            return self._pack_reply(into, -1)

    def load(self, weights: Sequence[Tensor], state: Mapping[str, dict[str, Any]]) -> None:
        """Continue from other weights and an optimiser state."""
        with self._lock, torch.no_grad():
            torch._foreach_copy_([parameter.detach() for parameter in self.parameters], list(weights))
            for name, parameter in zip(self.names, self.parameters, strict=True):
                self.optimizer.state[parameter] = clone_tensors(state.get(name, {}))

    def state(self) -> dict[str, dict[str, Any]]:
        """Return a copy of the optimiser state, by parameter name."""
        with self._lock:
            return optimizer_state_of(self.names, self.parameters, self.optimizer)

    def _pack_reply(self, into: PackedTensors, ticket: int) -> ServerReply:
        into.pack([parameter.detach() for parameter in self.parameters])
        return ServerReply(self._version, ticket, failed=self.failure is not None)

    def _step_or_fail(
        self, gradients: Sequence[Tensor], used: Sequence[bool], settings: Sequence[float], factor: float
    ) -> None:
        """Step; an error is kept as the failure, which workers receive and the server's rank raises."""
        try:
            self._step(gradients, used, settings, factor)
        except Exception as error:
            self.fail(error)

    def fail(self, failure: Exception) -> None:
        """Mark the server as failed; all later replies report it. Only the first failure is kept."""
        self.failure = self.failure or failure
        self.has_failed.set()

    def describe_failure(self) -> dict[str, Any]:
        """Return the reason of the failure as values that can be sent as JSON."""
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
        if factor < 1 and gradients:  # Scales the gradient, not the learning rate, so that momentum is damped too.
            torch._foreach_mul_(list(gradients), factor)
        for parameter, gradient, is_used in zip(self.parameters, gradients, used, strict=True):
            parameter.grad = gradient if is_used else None
        self.settings.write(settings, self._workers)
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        self._version += 1
