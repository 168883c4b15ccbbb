"""Worker of a parameter server: sends gradients to all servers, and trains with the weights that they send back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from paceline.errors import RankError
from paceline.strategies.parameter_server.client import LocalServerClient, ServerClient
from paceline.strategies.parameter_server.optimizer_settings import OptimizerSettings
from paceline.strategies.parameter_server.protocol import ServerReply
from paceline.strategies.parameter_server.server import ServerSetup
from paceline.strategies.parameter_server.server_shard import ServerShard


class Worker(ABC):
    """Base class of workers: connections to all servers, and the server on this rank if there is one."""

    ticket: int | None = None
    """Share of the data that this worker trains next; None if it trains its own share of every step."""

    def __init__(self, setup: ServerSetup) -> None:
        comm = self._comm = setup.comm
        self._parameters = setup.parameters
        self._optimizer = setup.optimizer
        self._settings = OptimizerSettings(setup.optimizer)
        self._update = setup.update
        if comm.servers and comm.rank == 0:
            for shard in setup.shards:
                shard.send_weights(shard.server_rank, setup.group)
        own = setup.own_shard
        self._local = None if own is None or own.is_empty else self.start_server(own, setup)
        remote = [
            ServerClient(shard, comm, setup.group, leads=self.leads(shard))
            for shard in setup.shards
            if shard is not own
        ]
        self._remote = [client for client in remote if not client.shard.is_empty]
        self._empty = [client for client in remote if client.shard.is_empty and comm.servers]
        """Clients of servers on separate ranks that keep no parameters; they too serve until all workers leave."""
        self._clients: list[ServerClient | LocalServerClient] = [*self._remote]
        if self._local is not None:
            self._clients.append(self._local)
        for client in self._clients:
            client.shard.accept_weights()

    @abstractmethod
    def leads(self, shard: ServerShard) -> bool:
        """Return whether this worker sends requests to the server of a shard on another rank."""

    @abstractmethod
    def start_server(self, shard: ServerShard, setup: ServerSetup) -> LocalServerClient:
        """Start the server on this rank."""

    @abstractmethod
    def step(self, max_norm: float | None) -> None:
        """Send gradients to all servers, and continue with the weights that they send back."""

    def finish(self) -> None:  # noqa: B027  (a synchronous step leaves nothing in progress)
        """Give every worker the same weights: the result of all gradients sent so far."""

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the optimiser state of all servers; called on every worker."""
        found: dict[str, dict[str, Any]] = {}
        for client in sorted(self._clients, key=lambda client: client.shard.server_rank):
            found |= client.state()
        return found

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Make the servers continue from the model's weights and an optimiser state; called on every worker."""
        for client in self._clients:
            client.load(state)
        for client in self._remote:  # Another rank steps these.
            for parameter in client.shard.parameters:
                self._optimizer.state.pop(parameter, None)
        for client in self._clients:
            client.shard.accept_weights()

    @abstractmethod
    def on_model_load(self) -> None:
        """Follow a call of the model's `load_state_dict` in a user's loop."""

    @abstractmethod
    def on_optimizer_load(self) -> None:
        """Follow a call of the optimiser's `load_state_dict` in a user's loop."""

    @abstractmethod
    def complete_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Add what servers on other ranks keep to a result of the optimiser's `state_dict`; raise if impossible."""

    def metrics(self) -> dict[str, Any]:
        """Return the figures of this policy for the run's summary."""
        return {}

    def abandon(self) -> None:  # noqa: B027  (synchronous servers detect lost workers by their closed connections)
        """Leave after an error on this rank, without waiting for other ranks."""

    def close(self) -> None:
        """Leave all servers; a server on this rank serves until all other workers have left."""
        self.leave()
        if self._local is not None:
            self._local.server.close()

    def leave(self) -> None:
        """Let the servers on other ranks stop to wait for this worker."""
        for client in (*self._remote, *self._empty):
            with suppress(RankError):  # The server's process may have ended already.
                client.leave()

    def push(self, settings: Sequence[float], max_norm: float | None) -> None:
        """Start to send gradients to all servers. All receives are started first, so that no sender waits for one."""
        for client in self._remote:
            client.start_receiving()
        if self._local is not None:
            self._local.push(settings, max_norm)
        for client in self._remote:
            client.push(settings, max_norm)

    def wait(self) -> dict[int, ServerReply]:
        """Wait for the weights of all servers; raise if one has failed. Return the replies by the server's rank."""
        replies = {client.shard.server_rank: client.wait() for client in self._clients}
        if self._local is not None and self._local.server.failure is not None:
            raise self._local.server.failure
        for client in self._remote:
            if replies[client.shard.server_rank].failed:
                raise client.failure()
        for each in self._clients:
            each.shard.record_weights()
        for each in self._clients:
            each.shard.verdict.check()
        return replies
