"""Connection of a worker to a server: by messages to another rank, or by function calls on the same rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from paceline.comm.group import Comm
from paceline.comm.groups.timed import untimed_group
from paceline.comm.messages.json_messages import SentT, receive_json_message, receive_typed, send_json_message
from paceline.comm.messages.packed_tensors import PackedTransfer, naming_peer
from paceline.errors import RankError
from paceline.records.timeline import Purpose
from paceline.strategies.parameter_server.protocol import (
    REPLIES,
    STATES,
    WEIGHTS,
    RequestKind,
    ServerFailure,
    ServerReply,
    ServerRequest,
    start_receiving,
)
from paceline.strategies.parameter_server.server import GroupExchange, Server
from paceline.strategies.parameter_server.server_shard import ServerShard, state_to_device
from paceline.strategies.parameter_server.staleness import Staleness

NO_REPLY = ServerReply(version=0, ticket=-1)
"""Reply before the first one, and on workers that get none."""


class ServerClient:
    """Connection of a worker to one server on another rank, with the messages in progress."""

    def __init__(self, shard: ServerShard, comm: Comm, group: dist.ProcessGroup, *, leads: bool) -> None:
        self.shard = shard
        self._comm = comm
        self._group = group
        self._leads = leads
        """Whether this worker sends the requests of its group."""
        self._version = 0
        self._sent_settings: Sequence[float] = ()
        self._reply = ServerReply.empty()
        self._receiving: list[PackedTransfer] = []
        self._sending: list[PackedTransfer] = []

    def start_receiving(self) -> None:
        """Start to receive weights, and the reply if this worker is a lead; `push` follows."""
        rank, group = self.shard.server_rank, self._group
        self._receiving = [start_receiving(self._reply, rank, group, REPLIES)] if self._leads else []
        with self._comm.carrying(Purpose.WEIGHTS):
            self._receiving.append(self.shard.weights.receive(rank, group, WEIGHTS))
        self._sending = []

    def push(self, settings: Sequence[float], max_norm: float | None) -> None:
        """Start to send gradients, after `start_receiving`."""
        if self._leads:
            used = () if all(self.shard.used) else self.shard.used
            changed = settings if used or settings != self._sent_settings else ()
            self._sent_settings = settings
            self._start_request(ServerRequest(RequestKind.PUSH, self._version, max_norm, changed, used))
        self._sending.append(self.shard.send_gradients(self._group))

    def pull(self) -> None:
        """Start to receive the current weights."""
        self.start_receiving()
        self._start_request(ServerRequest(RequestKind.PULL))

    def wait(self) -> ServerReply:
        """Wait for the weights, copy them into the model, and return the reply; only a lead receives one."""
        for message in self._receiving:
            message.wait()
        self.shard.unpack_weights()
        for message in self._sending:
            message.wait()
        if not self._leads:
            return NO_REPLY
        reply = ServerReply.read(self._reply)
        self._version = reply.version
        return reply

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the optimiser state of the server."""
        self._request(RequestKind.STATE)
        with naming_peer(self.shard.server_rank):
            state = receive_json_message(self.shard.server_rank, untimed_group(self._group), STATES)
        return state_to_device(state, self._comm.device)

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Make a server on a separate rank continue from the model's weights and an optimiser state."""
        if not self._comm.servers or self._comm.rank:  # A worker on the server's rank, or worker 0, does it.
            return
        rank, group = self.shard.server_rank, untimed_group(self._group)
        self._request(RequestKind.LOAD)
        self.shard.send_weights(rank, group)
        with naming_peer(rank):
            send_json_message({name: state.get(name, {}) for name in self.shard.names}, rank, group, STATES)

    def staleness(self) -> Staleness:
        """Return the staleness of the gradients that the server has received."""
        self._request(RequestKind.STALENESS)
        return self._receive_typed(Staleness)

    def failure(self) -> RankError:
        """Return the failure of the server, after a reply that reports one."""
        self._request(RequestKind.FAILURE)
        failure = self._receive_typed(ServerFailure)
        message = f"the server on rank {self.shard.server_rank} has failed: {failure.reason}"
        return RankError(message, detail=failure.detail, peer_lost=failure.peer_lost)

    def leave(self) -> None:
        """Let the server stop to wait for this worker's group."""
        self._request(RequestKind.LEAVE)

    def _request(self, kind: RequestKind) -> None:
        """Send a request without gradients, if this worker leads its group."""
        if self._leads:
            for message in ServerRequest(kind).start_sending(self.shard.server_rank, self._group):
                message.wait()

    def _start_request(self, request: ServerRequest) -> None:
        self._sending += request.start_sending(self.shard.server_rank, self._group)

    def _receive_typed(self, kind: type[SentT]) -> SentT:
        with naming_peer(self.shard.server_rank):
            return receive_typed(kind, self.shard.server_rank, untimed_group(self._group), STATES)


class LocalServerClient:
    """Connection of a worker to the server on its own rank, by function calls; the worker leads its group there."""

    def __init__(self, shard: ServerShard, server: Server, exchange: GroupExchange) -> None:
        self.shard = shard
        self.server = server
        self._exchange = exchange
        self._request = ServerRequest(RequestKind.PUSH)
        self._reply = NO_REPLY
        self._sending: list[PackedTransfer] = []

    def push(self, settings: Sequence[float], max_norm: float | None) -> None:
        """Start to receive the gradients of the group's other workers; `update` uses them."""
        self._exchange.start_receiving()
        self._request = ServerRequest(RequestKind.PUSH, self._reply.version, max_norm, settings, self.shard.used)

    def update(self) -> None:
        """Let the server step with the gradients of `push`, and start to send the new weights."""
        self.shard.pack_gradients()
        self._reply = self.server.push(self._exchange, self._request)
        self._sending = self._exchange.start_sending_weights()

    def pull(self) -> None:
        """Read the current weights."""
        self._reply = self.server.pull(self._exchange)

    def wait(self) -> ServerReply:
        """Copy the weights into the model, unless the server steps the model itself; return the reply."""
        if self.server.parameters is not self.shard.parameters:
            self.shard.unpack_weights()
        for message in self._sending:
            message.wait()
        self._sending = []
        return self._reply

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the optimiser state of the server, and send it to the group's other workers."""
        state = self.server.state()
        self._exchange.send_json(state)
        return state

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Make the server continue from the model's weights and an optimiser state."""
        self.server.load([parameter.detach() for parameter in self.shard.parameters], state)
