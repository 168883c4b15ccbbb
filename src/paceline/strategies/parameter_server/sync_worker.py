"""Synchronous worker: sends its gradients to all servers and waits for the new weights, together with all workers.

A server beside a worker steps that worker's parameters with that worker's optimiser. A server on a separate rank steps
the parameters of its own model, on requests from worker 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.group import Comm
from paceline.comm.json_messages import receive_json_message, send_json_message
from paceline.comm.packed_tensors import naming_peer
from paceline.errors import RankError
from paceline.records.timeline import Purpose
from paceline.strategies.parameter_server.optimizer_settings import OptimizerSettings
from paceline.strategies.parameter_server.server_shard import (
    REQUESTS,
    STATES,
    WEIGHTS,
    ServerShard,
    send_optimizer_state,
    state_to_device,
)
from paceline.strategies.parameter_server.sync_server import (
    LEAVE,
    LOAD,
    REQUEST_NUMBERS,
    SETTINGS,
    STATE,
    STEP,
    ShardReducer,
    clip_factor,
)


class SyncWorker:
    """Synchronous worker, and the server on its rank if there is one."""

    def __init__(
        self,
        shards: Sequence[ServerShard],
        optimizer: torch.optim.Optimizer,
        comm: Comm,
        group: dist.ProcessGroup,
        update: Callable[[], None],
    ) -> None:
        self._shards = shards
        self._optimizer = optimizer
        self._comm = comm
        self._group = group
        self._update = update
        self._remote = [shard for shard in shards if shard.server_rank != comm.rank and not shard.is_empty]
        local = [shard for shard in shards if shard.server_rank == comm.rank]
        self._reducer = ShardReducer(local[0], comm.world_size, group, comm.device) if local else None
        """Server on this rank, or None."""
        self._controlled = shards if comm.servers and comm.rank == 0 else []
        """Shards of the servers to which this worker sends requests: all servers on separate ranks, for worker 0."""
        self._settings = OptimizerSettings(optimizer)
        self._sent_settings: list[float] = []
        for shard in self._controlled:
            shard.send_weights(shard.server_rank, group)

    def step(self, max_norm: float | None) -> None:
        """Send gradients to the servers, step this rank's shard if it is a server, and receive the other weights."""
        group, local = self._group, self._reducer
        self._request_step(max_norm)
        with self._comm.carrying(Purpose.WEIGHTS):
            receiving = [shard.weights.receive(shard.server_rank, group, WEIGHTS) for shard in self._remote]
        if local is not None:
            local.start_receiving()
        sending = [shard.send_gradients(group) for shard in self._remote]
        for shard in self._remote:
            for parameter in shard.parameters:  # Another rank steps these.
                parameter.grad = None
        if local is not None:
            local.average(local.shard.used)
        if max_norm is not None and not self._comm.servers:
            self._clip(max_norm)
        self._update()
        if local is not None:
            with self._comm.carrying(Purpose.WEIGHTS):
                sending += local.start_sending_weights()
        for shard, weights in zip(self._remote, receiving, strict=True):
            weights.wait()
            shard.unpack_weights()
        for message in sending:
            message.wait()

    def _request_step(self, max_norm: float | None) -> None:
        """Request a step from servers on separate ranks, with the norm to clip to and changed optimiser settings."""
        if not self._comm.servers:
            return
        settings = self._settings.read()  # On all ranks, so that a setting that cannot be sent raises on each.
        if settings != self._sent_settings:  # In the first step, and when a scheduler has changed them.
            self._sent_settings = settings
            self._send_request(SETTINGS, len(settings), then=lambda _: torch.tensor(settings, dtype=torch.float64))
        if all(all(shard.used) for shard in self._controlled):
            self._send_request(STEP, math.nan if max_norm is None else max_norm)
        else:
            flags = {shard.server_rank: torch.tensor(shard.used, dtype=torch.uint8) for shard in self._controlled}
            self._send_request(
                STEP, math.nan if max_norm is None else max_norm, 1, then=lambda shard: flags[shard.server_rank]
            )

    def _send_request(self, *numbers: float, then: Callable[[ServerShard], Tensor] | None = None) -> None:
        """Send a request to all controlled servers, followed by the tensor that `then` returns for the shard."""
        for shard in self._controlled:
            request = torch.zeros(REQUEST_NUMBERS, dtype=torch.float64)
            request[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
            for tensor in [request] if then is None else [request, then(shard)]:
                if tensor.numel():
                    with naming_peer(shard.server_rank):
                        dist.send(tensor, group_dst=shard.server_rank, group=self._group, tag=REQUESTS)

    def finish(self) -> None:
        """Do nothing: a step leaves no communication in progress."""

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the optimiser state of all servers; called on every worker."""
        self._send_request(STATE)
        found: dict[str, dict[str, Any]] = {}
        for shard in self._shards:
            if shard.server_rank == self._comm.rank:
                found |= send_optimizer_state(shard, self._optimizer, self._comm, self._group)
            else:
                received = receive_json_message(shard.server_rank, self._group, STATES)
                found |= state_to_device(received, self._comm.device)
        return found

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Send the weights and an optimiser state to the servers; drop state of parameters that other ranks step."""
        self._send_request(LOAD)
        for shard in self._controlled:
            shard.send_weights(shard.server_rank, self._group)
            own = {name: state.get(name, {}) for name in shard.names}
            send_json_message(own, shard.server_rank, self._group, STATES)
        for shard in self._remote:
            for parameter in shard.parameters:
                self._optimizer.state.pop(parameter, None)

    def metrics(self) -> dict[str, Any]:
        """Return nothing: synchronous gradients are never stale."""
        return {}

    def abandon(self) -> None:
        """Do nothing: servers detect lost workers by their closed connections."""

    def close(self) -> None:
        """Stop the servers on separate ranks."""
        with suppress(RankError):  # The server's process may have ended already.
            self._send_request(LEAVE)

    def _clip(self, max_norm: float) -> None:
        """Clip by the norm over all servers; each server has only the norm of its shard."""
        own = torch.zeros(1, dtype=torch.float64) if self._reducer is None else self._reducer.squared_norm()
        total = own if len(self._shards) == 1 else self._comm.control.sum(own)
        if self._reducer is not None:
            self._reducer.scale(clip_factor(max_norm, total))
