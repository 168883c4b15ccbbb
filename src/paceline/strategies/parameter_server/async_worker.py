"""Asynchronous worker: sends its gradients to all servers at once and waits for no other worker."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.group import Comm
from paceline.comm.json_messages import receive_json_message, send_json_message
from paceline.comm.packed_tensors import PackedTransfer, naming_peer
from paceline.errors import RankError, UsageError
from paceline.strategies.base.strategy import MakeOptimizer, NamedParameters
from paceline.strategies.parameter_server.async_server import (
    AsyncServer,
    ServerRequest,
    start_colocated_server,
    untimed_group,
)
from paceline.strategies.parameter_server.optimizer_settings import OptimizerSettings
from paceline.strategies.parameter_server.server_shard import (
    REPLIES,
    REQUESTS,
    STATES,
    WEIGHTS,
    ServerShard,
    state_to_device,
)
from paceline.strategies.parameter_server.server_weights import ServerReply
from paceline.strategies.parameter_server.staleness import Staleness, StalenessBound


class ServerClient:
    """Connection of a worker to one server on another rank, with the messages in progress."""

    def __init__(self, shard: ServerShard, group: dist.ProcessGroup, settings: int) -> None:
        self.shard = shard
        self.version = 0
        """Version of the weights that the worker last received from this server."""
        self._group = group
        self._reply = torch.zeros(len(ServerReply._fields), dtype=torch.int64)
        self._request = torch.zeros(2 + settings + len(shard.names), dtype=torch.float64)
        self._receiving: list[PackedTransfer] = []
        self._sending: list[PackedTransfer] = []

    def push(self, settings: Sequence[float], used: Sequence[bool]) -> None:
        """Start to send gradients and to receive the new weights."""
        self._start_receiving()
        self.send_request(ServerRequest.PUSH, settings, used)
        self._sending.append(self.shard.send_gradients(self._group))

    def pull(self) -> None:
        """Start to receive the current weights."""
        self._start_receiving()
        self.send_request(ServerRequest.PULL)

    def wait(self) -> ServerReply:
        """Wait for the weights, copy them into the model, and return the reply."""
        for message in self._receiving:
            message.wait()
        self.shard.unpack_weights()
        for message in self._sending:
            message.wait()
        version, ticket, failed = self._reply.tolist()
        self.version = version
        return ServerReply(version, ticket, bool(failed))

    def send_request(self, request: ServerRequest, settings: Sequence[float] = (), used: Sequence[bool] = ()) -> None:
        """Send a request to the server."""
        numbers = [float(request), float(self.version), *settings, *map(float, used)]
        self._request[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        with naming_peer(self.shard.server_rank):
            dist.send(self._request, group_dst=self.shard.server_rank, group=self._group, tag=REQUESTS)

    def receive_json(self) -> dict[str, dict[str, Any]]:
        """Receive the server's reply to a request for its state, staleness or failure."""
        with naming_peer(self.shard.server_rank):
            return receive_json_message(self.shard.server_rank, untimed_group(self._group), STATES)

    def _start_receiving(self) -> None:
        rank, group = self.shard.server_rank, self._group
        with naming_peer(rank):
            reply = PackedTransfer(dist.irecv(self._reply, group_src=rank, group=group, tag=REPLIES), rank)
        self._receiving, self._sending = [reply, self.shard.weights.receive(rank, group, WEIGHTS)], []


class AsyncWorker:
    """Asynchronous worker, and the server on its rank if there is one."""

    def __init__(
        self,
        shards: Sequence[ServerShard],
        parameters: NamedParameters,
        optimizer: torch.optim.Optimizer,
        make_optimizer: MakeOptimizer,
        comm: Comm,
        group: dist.ProcessGroup,
        bound: StalenessBound,
    ) -> None:
        self._bound = bound
        self.ticket = comm.rank
        """Share of the data that this worker trains next; the first one is its own share of the first step."""
        self._comm = comm
        self._shards = shards
        self._parameters = parameters
        self._optimizer = optimizer
        here = [shard for shard in shards if shard.server_rank == comm.rank and not shard.is_empty]
        for shard in shards if comm.servers and comm.rank == 0 else []:
            shard.send_weights(shard.server_rank, group)
        servers = [start_colocated_server(shard, parameters, make_optimizer, comm, group, bound) for shard in here]
        self._local = [LocalServerClient(shard, server, comm) for shard, server in zip(here, servers, strict=True)]
        self._settings = OptimizerSettings(optimizer)
        remote = [
            ServerClient(shard, group, self._settings.count) for shard in shards if shard.server_rank != comm.rank
        ]
        self._remote = [client for client in remote if not client.shard.is_empty]
        self._empty = [client for client in remote if client.shard.is_empty and comm.servers]
        """Clients of servers on separate ranks that keep no parameters; they too serve until all workers leave."""
        self._untimed = untimed_group(group)

    def step(self, max_norm: float | None) -> None:
        """Send gradients to all servers, and continue with the weights that they reply."""
        if max_norm is not None:
            raise UsageError(
                "asynchronous servers cannot clip: no rank has the gradient of a whole batch.",
                hint="call step() without max_norm, or clip this rank's own gradients before step()",
            )
        settings = self._settings.read()
        for client in self._remote:
            client.push(settings, client.shard.used)
        for local in self._local:
            local.push(settings)
        replies = self._wait()
        self.ticket = next(reply.ticket for rank, reply in replies if rank == self._shards[0].server_rank)
        self._comm.mark_agreed()
        for _, parameter in self._parameters:
            parameter.grad = None
        self._optimizer.step()  # It steps nothing, but learning-rate schedulers check that it is called.

    def finish(self) -> None:
        """Wait for all workers, and give each the same weights: the result of all gradients sent so far."""
        self._comm.smallest(0)
        for client in self._remote:
            client.pull()
        for local in self._local:
            local.pull()
        self._wait()
        self._comm.smallest(0)  # A barrier: no worker continues before all have the weights.

    def _wait(self) -> list[tuple[int, ServerReply]]:
        """Wait for the replies of all servers; raise if one has failed. Return them with the servers' ranks."""
        replies = [(client.shard.server_rank, client.wait()) for client in self._remote]
        replies += [(local.shard.server_rank, local.wait()) for local in self._local]
        for local in self._local:
            if local.server.weights.failure is not None:
                raise local.server.weights.failure
        for client, (_, reply) in zip(self._remote, replies, strict=False):
            if reply.failed:
                raise self._failure_of(client)
        return replies

    def _failure_of(self, client: ServerClient) -> RankError:
        client.send_request(ServerRequest.FAILURE)
        failure = client.receive_json()["failure"]
        message = f"the server on rank {client.shard.server_rank} has failed: {failure['reason']}"
        return RankError(message, detail=failure["detail"], peer_lost=failure["peer_lost"])

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the optimiser state of all servers."""
        found: dict[str, dict[str, Any]] = {}
        for client in self._remote:
            client.send_request(ServerRequest.STATE)
            found |= state_to_device(client.receive_json(), self._comm.device)
        for local in self._local:
            found |= local.server.weights.state()
        return found

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Make the servers continue from the model's weights and an optimiser state."""
        self._optimizer.state.clear()  # The worker's optimiser steps nothing.
        self._comm.smallest(0)
        for local in self._local:
            weights = [parameter.detach() for parameter in local.shard.parameters]
            local.server.weights.load(weights, state_to_device(state, self._comm.device))
        if self._comm.rank == 0:
            for client in self._remote:
                rank = client.shard.server_rank
                client.send_request(ServerRequest.LOAD)
                client.shard.send_weights(rank, self._untimed)
                own = {name: state.get(name, {}) for name in client.shard.names}
                with naming_peer(rank):
                    send_json_message(own, rank, self._untimed, STATES)
        self.finish()

    def metrics(self) -> dict[str, Any]:
        """Return the staleness of gradients over all servers, for the run's summary."""
        return {"staleness": self._staleness().summary(self._bound.max_staleness or None)}

    def _staleness(self) -> Staleness:
        total = Staleness()
        for client in self._remote:
            client.send_request(ServerRequest.STALENESS)
            received = client.receive_json()
            total.add(Staleness.from_dict(json.loads(received["staleness"]["json"])))
        for local in self._local:
            total.add(local.server.weights.staleness)
        return total

    def abandon(self) -> None:
        """Leave after an error; other workers receive a failure with the next reply of the server on this rank."""
        for local in self._local:
            local.server.weights.fail(RankError("the worker on its rank has failed.", peer_lost=True))
        self._leave()

    def close(self) -> None:
        """Leave all servers; a server on this rank serves until all other workers have left."""
        self._leave()
        for local in self._local:
            local.server.close()

    def _leave(self) -> None:
        for client in (*self._remote, *self._empty):
            with suppress(RankError):  # The server's process may have ended already.
                client.send_request(ServerRequest.LEAVE)


class LocalServerClient:
    """Connection of a worker to the server on its own rank, by function calls."""

    def __init__(self, shard: ServerShard, server: AsyncServer, comm: Comm) -> None:
        self.shard = shard
        self.server = server
        self._comm = comm
        self._reply = ServerReply(0, comm.rank)

    def push(self, settings: Sequence[float]) -> None:
        self.shard.gradients.pack([parameter.grad for parameter in self.shard.parameters])
        self._reply = self.server.weights.push(
            self.shard.gradients.views, self.shard.used, settings, self._reply.version, self.shard.weights
        )

    def pull(self) -> None:
        self._reply = self.server.weights.pull(self.shard.weights)

    def wait(self) -> ServerReply:
        self.shard.unpack_weights()
        return self._reply
