"""Server of one shard: executes the requests of its groups of workers. Its policy is the way in which it steps."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.group import Comm
from paceline.comm.groups.timed import untimed_group
from paceline.comm.messages.json_messages import JsonMessage, receive_json_message, send_json_message, send_typed
from paceline.comm.messages.packed_tensors import PackedTransfer, naming_peer
from paceline.records.timeline import Purpose
from paceline.strategies.base.optimizer_state import load_optimizer_state
from paceline.strategies.base.strategy import MakeOptimizer, NamedParameters
from paceline.strategies.parameter_server.optimizer_settings import OptimizerSettings
from paceline.strategies.parameter_server.protocol import (
    GRADIENTS,
    STATES,
    WEIGHTS,
    RequestKind,
    ServerReply,
    ServerRequest,
)
from paceline.strategies.parameter_server.server_shard import ServerShard, optimizer_state_of
from paceline.strategies.parameter_server.staleness import StalenessLimit
from paceline.strategies.parameter_server.step_marks import Verdict, compare_marks


@dataclass(frozen=True, kw_only=True)
class ServerSetup:
    """Everything that workers and servers are created with."""

    shards: Sequence[ServerShard]
    """One for each server, in the order of their ranks."""
    parameters: NamedParameters
    optimizer: torch.optim.Optimizer
    make_optimizer: MakeOptimizer
    comm: Comm
    group: dist.ProcessGroup
    """Group for the messages between workers and servers."""
    update: Callable[[], None]
    """Function that steps the optimiser of this rank and clears its gradients."""
    report_mean: Callable[[Sequence[Tensor]], None]
    """Function that gets the mean gradients of a server beside a worker, before clipping."""
    limit: StalenessLimit

    @property
    def own_shard(self) -> ServerShard | None:
        """Shard of the server on this rank; None without a server here."""
        return next((shard for shard in self.shards if shard.server_rank == self.comm.rank), None)


class GroupExchange:
    """Messages of a server with one group of workers: gradients, of which it takes the mean, and weights."""

    def __init__(
        self, shard: ServerShard, workers: Sequence[int], comm: Comm, group: dist.ProcessGroup, settings: int
    ) -> None:
        """Use the shard's buffers; `settings` is the number of settings in a request."""
        self.lead = comm.rank if comm.rank in workers else workers[0]
        self._shard = shard
        self._comm = comm
        self._group = group
        self._settings_count = settings
        self._settings: Sequence[float] = ()
        """Settings of the group's optimisers in its last request that had them."""
        self._others = [rank for rank in workers if rank != comm.rank]
        self._gradients = {rank: shard.gradients if rank == self.lead else shard.make_buffer() for rank in workers}
        self._receiving: list[PackedTransfer] = []
        self.verdict = Verdict()
        """Result of comparing the marks of the last gradients."""

    def receive_request(self) -> ServerRequest:
        """Receive a request from the lead. It is not timed: the wait for it is the worker's compute time."""
        request = ServerRequest.receive(self.lead, untimed_group(self._group), self._settings_count)
        self._settings = request.settings or self._settings
        return replace(request, settings=self._settings)

    def start_receiving(self) -> None:
        """Start to receive the gradients of all workers on other ranks."""
        self._receiving = [self._gradients[rank].receive(rank, self._group, GRADIENTS) for rank in self._others]

    def mean(self) -> list[Tensor]:
        """Wait for the gradients of all workers, and return their mean; `verdict` says whether their marks differ."""
        for message in self._receiving:
            message.wait()
        marks = {rank: self._shard.mark_of(packed) for rank, packed in self._gradients.items()}
        self.verdict = compare_marks(marks, server_trains=self._comm.rank in marks)
        buffers = list(self._gradients.values())
        # Summed in rank order, so that the mean is bitwise the same in any order of arrival.
        for parts in zip(*(packed.flats for packed in buffers), strict=True):
            if parts[0].is_floating_point() or parts[0].is_complex():  # Marks are integers.
                _average(parts)
        return buffers[0].views[: len(self._shard.parameters)]

    def pack_weights(self, parameters: Sequence[Tensor]) -> None:
        """Copy the weights into the buffer that they are sent from."""
        self._shard.pack_weights(parameters, self.verdict)

    def start_sending_weights(self) -> list[PackedTransfer]:
        """Start to send the packed weights to all workers on other ranks."""
        with self._comm.carrying(Purpose.WEIGHTS):
            return self._shard.weights.send(self._others, self._group, WEIGHTS)

    def send_weights(self, reply: ServerReply) -> None:
        """Send the packed weights to all workers, and a reply to the lead, on other ranks."""
        for message in [reply.start_sending(self.lead, self._group), *self.start_sending_weights()]:
            message.wait()

    def send_json(self, message: JsonMessage) -> None:
        """Send a message to all workers on other ranks."""
        for rank in self._others:
            with naming_peer(rank):
                send_json_message(message, rank, untimed_group(self._group), STATES)

    def send_typed(self, value: Any) -> None:
        """Send a value to all workers on other ranks, which receive it by its type."""
        for rank in self._others:
            with naming_peer(rank):
                send_typed(value, rank, untimed_group(self._group), STATES)

    def receive_load(self) -> tuple[list[Tensor], dict[str, dict[str, Any]]]:
        """Receive weights and an optimiser state from the lead."""
        group = untimed_group(self._group)
        self._shard.weights.receive(self.lead, group, WEIGHTS).wait()
        weights = self._shard.weights.views[: len(self._shard.parameters)]
        return weights, receive_json_message(self.lead, group, STATES)


@torch.no_grad()
def _average(parts: Sequence[Tensor]) -> None:
    """Set the first tensor to the mean of all, summed in the given order.

    Half precision is summed in float32, where the sum of large gradients does not overflow.
    """
    if len(parts) == 1:
        return
    total = parts[0].float() if parts[0].dtype in (torch.float16, torch.bfloat16) else parts[0]
    for part in parts[1:]:
        total += part
    total /= len(parts)
    if total is not parts[0]:
        parts[0].copy_(total)


class Server(ABC):
    """Base class of servers: keeps the parameters of a shard with their optimiser, and executes requests.

    A server on a separate rank has an optimiser of all parameters of its model, with the same groups as the workers',
    but only the parameters of its shard get gradients.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        device: torch.device,
    ) -> None:
        self.names = names
        self.parameters = parameters
        self.optimizer = optimizer
        self.failure: Exception | None = None
        """Error that replies report, after which the weights are not valid; a server without threads raises instead."""
        self._device = device
        self._settings = OptimizerSettings(optimizer)
        self._applied_settings: Sequence[float] = ()
        self._version = 0
        self._lock = threading.Lock()

    def make_exchange(self, shard: ServerShard, workers: Sequence[int], setup: ServerSetup) -> GroupExchange:
        """Return the messages with a group of workers, through the buffers of `shard`."""
        return GroupExchange(shard, workers, setup.comm, setup.group, self._settings.count)

    @classmethod
    @abstractmethod
    def on_separate_rank(cls, shard: ServerShard, setup: ServerSetup) -> Self:
        """Return the server of a rank that does not train, with the weights of worker 0."""

    @abstractmethod
    def serve(self) -> None:
        """Execute requests until all workers have left; called on a separate rank."""

    @abstractmethod
    def update(self, gradients: Sequence[Tensor], request: ServerRequest) -> int:
        """Step with a group's mean gradients; return the ticket for the reply."""

    def close(self) -> None:  # noqa: B027  (only a server with threads waits)
        """Wait until all workers have left."""

    def push(self, exchange: GroupExchange, request: ServerRequest) -> ServerReply:
        """Step with a group's gradients, and pack the new weights."""
        gradients = exchange.mean()
        if exchange.verdict.difference:  # Steps nothing, but takes part in clipping, where other servers wait.
            request = replace(request, used=[False] * len(self.parameters))
        with self._lock:
            return self._reply(exchange, self.update(gradients, request))

    def pull(self, exchange: GroupExchange) -> ServerReply:
        """Pack the current weights."""
        with self._lock:
            return self._reply(exchange, ticket=-1)

    def state(self) -> dict[str, dict[str, Any]]:
        """Return a copy of the optimiser state, by parameter name."""
        with self._lock:
            return optimizer_state_of(self.names, self.parameters, self.optimizer)

    def load(self, weights: Sequence[Tensor], state: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue from other weights and an optimiser state."""
        with self._lock, torch.no_grad():
            torch._foreach_copy_([parameter.detach() for parameter in self.parameters], list(weights))
            load_optimizer_state(self.optimizer, zip(self.names, self.parameters, strict=True), state)

    def serve_group(self, exchange: GroupExchange) -> None:
        """Execute the requests of a group's lead until the group leaves."""
        while (request := exchange.receive_request()).kind is not RequestKind.LEAVE:
            self.execute(request, exchange)

    def execute(self, request: ServerRequest, exchange: GroupExchange) -> None:
        """Execute one request of a lead on another rank."""
        if request.kind is RequestKind.PUSH:
            exchange.start_receiving()
            exchange.send_weights(self.push(exchange, request))
            exchange.verdict.check()
        elif request.kind is RequestKind.PULL:
            exchange.send_weights(self.pull(exchange))
        elif request.kind is RequestKind.STATE:
            exchange.send_json(self.state())
        elif request.kind is RequestKind.LOAD:
            self.load(*exchange.receive_load())
        else:
            raise AssertionError(f"{type(self).__name__} has no answer to {request.kind.name}")

    def apply(self, request: ServerRequest, gradients: Sequence[Tensor], updates_per_step: int = 1) -> None:
        """Set the optimiser's settings and gradients to those of a request; an unused parameter gets no gradient."""
        if request.settings and request.settings != self._applied_settings:
            self._settings.write(request.settings, updates_per_step)
            self._applied_settings = request.settings
        used = request.used or [True] * len(self.parameters)
        for parameter, gradient, is_used in zip(self.parameters, gradients, used, strict=True):
            parameter.grad = gradient if is_used else None

    def _reply(self, exchange: GroupExchange, ticket: int) -> ServerReply:
        exchange.pack_weights(self.parameters)
        return ServerReply(self._version, ticket, failed=self.failure is not None)
