"""Synchronous policy: a server waits for the gradients of all workers, averages them, steps once and replies to all.

All workers are one group. A server beside a worker steps that worker's parameters with that worker's optimiser, and
needs no requests. A server on a separate rank steps its own model's parameters, on requests from worker 0. There are no
threads.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from paceline.errors import WorkloadError
from paceline.formatting import plural
from paceline.strategies.parameter_server.client import LocalServerClient
from paceline.strategies.parameter_server.protocol import NORMS, ServerRequest, start_receiving, start_sending
from paceline.strategies.parameter_server.server import Server, ServerSetup
from paceline.strategies.parameter_server.server_shard import ServerShard
from paceline.strategies.parameter_server.step_marks import StepMark
from paceline.strategies.parameter_server.worker import Worker

CLIP_EPSILON = 1e-6
"""Same value as in torch's clip_grad_norm_."""


class SyncServer(Server):
    """Synchronous server of a shard, beside a worker or on a separate rank."""

    def __init__(self, shard: ServerShard, setup: ServerSetup, sum_norms: Callable[[Tensor], Tensor]) -> None:
        super().__init__(shard.names, shard.parameters, setup.optimizer, setup.comm.device)
        self._step = setup.update
        self._report_mean = setup.report_mean
        self._sum_norms = sum_norms
        """Function that adds up the squared norms of all servers."""
        self.exchange = self.make_exchange(shard, range(setup.comm.world_size), setup)

    @classmethod
    def on_separate_rank(cls, shard: ServerShard, setup: ServerSetup) -> Self:
        shard.receive_weights(0, setup.group)
        return cls(shard, setup, lambda own: _exchange_norms(own, setup))

    def serve(self) -> None:
        self.serve_group(self.exchange)

    def update(self, gradients: Sequence[Tensor], request: ServerRequest) -> int:
        self.apply(request, gradients)
        self._report_mean([parameter.grad for parameter in self.parameters if parameter.grad is not None])
        if request.max_norm is not None:
            self._clip(request.max_norm)
        self._step()
        self._version += 1
        return -1  # Synchronous workers have no tickets: each trains its own share of every step.

    def _clip(self, max_norm: float) -> None:
        """Clip by the norm over all servers, as torch's clip_grad_norm_ does; each has only the norm of its shard."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        squares = [torch.linalg.vector_norm(gradient, dtype=_double(gradient)).square() for gradient in gradients]
        own = torch.stack(squares).sum().cpu().reshape(1) if squares else torch.zeros(1, dtype=torch.float64)
        norm = math.sqrt(float(self._sum_norms(own)))
        if gradients:
            torch._foreach_mul_(gradients, min(1.0, max_norm / (norm + CLIP_EPSILON)))


def _double(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


class SyncWorker(Worker):
    """Synchronous worker: makes each step together with all workers."""

    def __init__(self, setup: ServerSetup) -> None:
        self._server_count = sum(not shard.is_empty for shard in setup.shards)
        self._optimizer_loads = 0
        """Number of calls of the optimiser's `load_state_dict`."""
        super().__init__(setup)

    def leads(self, shard: ServerShard) -> bool:
        return self._comm.rank == 0 and shard.server_rank >= self._comm.world_size

    def start_server(self, shard: ServerShard, setup: ServerSetup) -> LocalServerClient:
        server = SyncServer(shard, setup, self._sum_norms)
        return LocalServerClient(shard, server, server.exchange)

    def step(self, max_norm: float | None) -> None:
        self._mark_step()
        # Read on all ranks, so that a setting that cannot be sent raises on each.
        self.push(self._settings.read() if self._comm.servers else (), max_norm)
        if self._local is not None:
            self._local.update()
        else:
            if max_norm is not None and not self._comm.servers:
                self._sum_norms(torch.zeros(1, dtype=torch.float64))
            self._update()
        self.wait()

    def _mark_step(self) -> None:
        """Prepare the checksums by which servers detect workers that do not make the same step."""
        settings = zlib.crc32(str(self._optimizer_loads).encode(), self._settings.checksum())
        for client in self._clients:
            shard = client.shard
            shard.mark = StepMark(settings, shard.weights_checksum() if shard.changed_weights() else 0)

    def on_model_load(self) -> None:
        """Do nothing: every server beside a worker steps the weights that its rank has loaded; marks are compared."""

    def on_optimizer_load(self) -> None:
        if self._comm.servers:
            raise WorkloadError(
                "the optimiser's load_state_dict() was called, but servers on separate ranks keep its state.",
                hint="call it in make_optimizer, which servers call too, or leave out extra=true",
            )
        self._optimizer_loads += 1

    def complete_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: ARG002
        if self._remote:
            alone = self._server_count == 1 and not self._comm.servers
            raise WorkloadError(
                f"rank {self._comm.rank} does not have the whole state of the optimiser: servers on other ranks keep "
                f"the state of {plural(sum(len(client.shard.names) for client in self._remote), 'parameter')}.",
                hint=f"call sync.optimizer.state_dict() on rank {self._remote[0].shard.server_rank} only"
                if alone
                else "call sync.strategy.state() on every rank, or use servers=1 and save on rank 0",
            )

    def _sum_norms(self, own: Tensor) -> Tensor:
        """Return the sum over the servers beside workers; every worker takes part."""
        return own if self._server_count == 1 else self._comm.control.sum(own)


def _exchange_norms(own: Tensor, setup: ServerSetup) -> Tensor:
    """Return the sum over the servers on separate ranks; each sends its own value to all others."""
    comm, group = setup.comm, setup.group
    others = [s.server_rank for s in setup.shards if s.server_rank != comm.rank and not s.is_empty]
    received = {rank: torch.zeros_like(own) for rank in others}
    receiving = [start_receiving(received[rank], rank, group, NORMS) for rank in others]
    sending = [start_sending(own, rank, group, NORMS) for rank in others]
    for message in receiving + sending:
        message.wait()
    norms = received | {comm.rank: own}
    return torch.stack([norms[rank] for rank in sorted(norms)]).sum()
