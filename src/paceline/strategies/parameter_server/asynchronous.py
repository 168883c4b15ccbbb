"""Asynchronous policy: a server steps with each gradient when it arrives and replies at once; no worker waits.

Each worker is a group of its own, and a server has a thread for each worker on another rank. A server beside a worker
has its own copy of its shard, because the worker's weights must not change while it computes with them.
"""

from __future__ import annotations

import threading
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.groups.timed import untimed_group
from paceline.comm.messages.packed_tensors import abort_connections
from paceline.errors import RankError, UsageError, WorkloadError
from paceline.formatting import short_seconds
from paceline.strategies.parameter_server.client import LocalServerClient
from paceline.strategies.parameter_server.protocol import RequestKind, ServerFailure, ServerRequest
from paceline.strategies.parameter_server.server import GroupExchange, Server, ServerSetup
from paceline.strategies.parameter_server.server_shard import ServerShard, optimizer_state_of
from paceline.strategies.parameter_server.staleness import Staleness
from paceline.strategies.parameter_server.worker import Worker

POLL_S = 0.2
"""Seconds between two checks whether all workers have left."""
GRACE_S = 5.0
"""Seconds in which workers can still receive a server's failure before its process ends."""


class AsyncServer(Server):
    """Asynchronous server, with one thread for each worker on another rank; a lock protects its weights."""

    def __init__(
        self,
        shard: ServerShard,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        setup: ServerSetup,
    ) -> None:
        """Serve the shard's names with these parameters, which may be copies of the shard's."""
        super().__init__(shard.names, parameters, optimizer, setup.comm.device)
        comm = setup.comm
        self.staleness = Staleness()
        self._limit = setup.limit
        self._workers = self._next_ticket = comm.world_size
        self._group = untimed_group(setup.group)
        self._timeout_s = comm.timeout_s
        self._has_failed = threading.Event()
        others = [rank for rank in range(comm.world_size) if rank != comm.rank]
        self._last_request_s = {rank: time.monotonic() for rank in others}
        """Time of each worker's last request."""
        named = list(zip(shard.names, shard.parameters, strict=True))
        exchanges = {
            rank: self.make_exchange(ServerShard(comm.rank, named, comm.device), [rank], setup) for rank in others
        }
        self._threads = {
            rank: threading.Thread(target=self._run, args=(exchange,), name=f"paceline-server-{rank}", daemon=True)
            for rank, exchange in exchanges.items()
        }
        for thread in self._threads.values():
            thread.start()
        # At the latest when the process ends.
        weakref.finalize(self, join_threads, self._threads, self._group)

    @classmethod
    def on_separate_rank(cls, shard: ServerShard, setup: ServerSetup) -> Self:
        shard.receive_weights(0, setup.group)
        return cls(shard, shard.parameters, setup.optimizer, setup)

    @classmethod
    def beside_worker(cls, shard: ServerShard, setup: ServerSetup) -> AsyncServer:
        """Return the server of a rank that trains, with a copy of the shard's weights.

        Its optimiser is created for all parameters, so that it has the same parameter groups as the worker's. Only the
        parameters of the shard take memory, and only they are stepped.
        """
        names = set(shard.names)
        copied = [
            (name, nn.Parameter(parameter.detach().clone() if name in names else _placeholder(parameter)))
            for name, parameter in setup.parameters
        ]
        kept = [parameter for name, parameter in copied if name in names]
        return cls(shard, kept, setup.make_optimizer(copied), setup)

    def update(self, gradients: Sequence[Tensor], request: ServerRequest) -> int:
        """Step with one worker's gradients, unless they are too stale.

        The gradients are those of one share of a global batch, so the learning rate is divided by the number of
        workers. This way, one update per worker changes the weights as much as one synchronous step, also with weight
        decay and with optimisers that normalise gradients. An error becomes the failure of the server, which workers
        receive and the server's rank raises.
        """
        staleness = self._version - request.version
        self.staleness.count(staleness)
        factor = self._limit.factor(staleness)
        if factor:
            self.staleness.damped += factor < 1
            try:
                self._step(gradients, request, factor)
            except Exception as error:
                self.fail(error)
        else:
            self.staleness.dropped += 1
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        return ticket

    def _step(self, gradients: Sequence[Tensor], request: ServerRequest, factor: float) -> None:
        if factor < 1 and gradients:  # Scales the gradient, not the learning rate, so that momentum is damped too.
            torch._foreach_mul_(list(gradients), factor)
        self.apply(request, gradients, updates_per_step=self._workers)
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        self._version += 1

    def execute(self, request: ServerRequest, exchange: GroupExchange) -> None:
        self._last_request_s[exchange.lead] = time.monotonic()
        if request.kind is RequestKind.STALENESS:
            exchange.send_typed(self.staleness)
        elif request.kind is RequestKind.FAILURE:
            exchange.send_typed(self.describe_failure())
        else:
            super().execute(request, exchange)

    def fail(self, failure: Exception) -> None:
        """Mark the server as failed; all later replies report it. Only the first failure is kept."""
        self.failure = self.failure or failure
        self._has_failed.set()

    def describe_failure(self) -> ServerFailure:
        """Return the reason of the failure, for the workers."""
        assert self.failure is not None
        known = isinstance(self.failure, RankError)
        return ServerFailure(
            reason=str(self.failure) if known else f"{type(self.failure).__name__}: {self.failure}",
            detail=None if known else "".join(traceback.format_exception(self.failure)).rstrip(),
            peer_lost=isinstance(self.failure, RankError) and self.failure.peer_lost,
        )

    def serve(self) -> None:
        """Serve until all workers have left; raise if the server fails or loses a worker."""
        while self._connected:
            if self._has_failed.wait(POLL_S):
                assert self.failure is not None
                raise self.failure

    def close(self) -> None:
        """Wait until all workers have left; raise a RankError that names a worker without a request for too long."""
        began_s = time.monotonic()
        while connected := self._connected:
            self._threads[connected[0]].join(POLL_S)
            silent_since_s, rank = min((max(began_s, self._last_request_s[rank]), rank) for rank in connected)
            if time.monotonic() - silent_since_s > self._timeout_s and self._threads[rank].is_alive():
                join_threads(self._threads, self._group, grace_s=0)
                raise RankError(
                    f"rank {rank} sent no request for {short_seconds(self._timeout_s)} and has not left the server.",
                    hint="see its log for the reason; every rank must call close(), and --timeout sets the limit",
                    peer_lost=True,
                )

    @property
    def _connected(self) -> list[int]:
        """Workers that have not left."""
        return [rank for rank, thread in self._threads.items() if thread.is_alive()]

    def _run(self, exchange: GroupExchange) -> None:
        """Serve one worker until it leaves; an error becomes the failure of the server."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            self.serve_group(exchange)
        except Exception as error:  # The other workers receive it with their next reply.
            self.fail(RankError(f"it lost the connection to rank {exchange.lead}: {error}", peer_lost=True))


def join_threads(threads: Mapping[int, threading.Thread], group: dist.ProcessGroup, grace_s: float = GRACE_S) -> None:
    """Wait for the threads to end; after `grace_s` seconds, abort the connections in which they wait.

    A process that ends while a thread waits in Gloo is aborted.
    """
    own, deadline_s = threading.current_thread(), time.monotonic() + grace_s
    for thread in threads.values():
        if thread is not own:
            thread.join(max(0.0, deadline_s - time.monotonic()))
    left = {rank: thread for rank, thread in threads.items() if thread is not own and thread.is_alive()}
    if left:
        abort_connections(next(iter(left)), group)
    for thread in left.values():
        thread.join(GRACE_S)


def _placeholder(parameter: Tensor) -> Tensor:
    """Return a tensor of the parameter's shape that takes no memory."""
    return parameter.detach().new_zeros(()).expand(parameter.shape)


class AsyncWorker(Worker):
    """Asynchronous worker: waits for no other worker, and trains the shares of the data that its tickets name."""

    def __init__(self, setup: ServerSetup) -> None:
        self._server: AsyncServer | None = None
        """Server on this rank, or None."""
        super().__init__(setup)
        self.ticket = setup.comm.rank  # Its own share of the first step.
        self._ticket_server = setup.shards[0].server_rank
        self._max_staleness = setup.limit.max_staleness
        self._timeout_s = setup.comm.timeout_s

    def leads(self, shard: ServerShard) -> bool:  # noqa: ARG002  (each worker is a group of its own)
        return True

    def start_server(self, shard: ServerShard, setup: ServerSetup) -> LocalServerClient:
        self._server = AsyncServer.beside_worker(shard, setup)
        return LocalServerClient(shard, self._server, self._server.make_exchange(shard, [setup.comm.rank], setup))

    def step(self, max_norm: float | None) -> None:
        if max_norm is not None:
            raise UsageError(
                "asynchronous servers cannot clip: no rank has the gradient of a whole batch.",
                hint="call step() without max_norm, or clip this rank's own gradients before step()",
            )
        self._check_weights()
        self.push(self._settings.read(), None)
        if self._local is not None:
            self._local.update()
        self.ticket = self.wait()[self._ticket_server].ticket
        self._update()  # It steps nothing, but learning-rate schedulers check that the optimiser is called.

    def finish(self) -> None:
        """Wait for all workers, and give each the same weights: the result of all gradients sent so far."""
        self._comm.control.barrier()
        for client in self._clients:
            client.pull()
        self.wait()
        self._comm.control.barrier()  # No worker continues before all have the weights.

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self._comm.control.barrier()
        super().load(state)
        self._optimizer.state.clear()  # The worker's optimiser steps nothing.
        self.finish()

    def on_model_load(self) -> None:
        """Carry the loaded weights to the servers; called on every worker."""
        self._wait_for_all("model.load_state_dict()")
        self.load(self.state())

    def on_optimizer_load(self) -> None:
        """Carry the loaded optimiser state to the servers; called on every worker."""
        names, parameters = zip(*self._parameters, strict=True)
        state = optimizer_state_of(names, parameters, self._optimizer)
        self._wait_for_all("sync.optimizer.load_state_dict()")
        self.finish()  # The servers continue from their own weights.
        self.load(state)

    def complete_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Add the state that the servers have now. It waits for no other worker."""
        state = self.state()
        members = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        numbers = {id(parameter): number for number, parameter in enumerate(members)}
        state_dict["state"] = {
            numbers[id(parameter)]: state[name]
            for name, parameter in self._parameters
            if state.get(name) and id(parameter) in numbers
        }

    def _check_weights(self) -> None:
        changed = {name for client in self._clients for name in client.shard.changed_weights()}
        if changed:
            first = next(name for name, _ in self._parameters if name in changed)
            raise WorkloadError(
                f"the weight {first} was changed outside step(), but asynchronous servers keep the weights: the "
                "change would be lost.",
                hint="load weights with model.load_state_dict(…) on every rank, or on rank 0 before attach()",
            )

    def _wait_for_all(self, call: str) -> None:
        try:
            self._comm.control.barrier()
        except RuntimeError as error:
            raise RankError(
                f"rank {self._comm.rank} called {call}, but not all ranks did so within "
                f"{short_seconds(self._timeout_s)}.",
                hint="call it on every rank, because asynchronous servers keep weights and state for all; or load on "
                "rank 0 before attach(), which copies its weights to all ranks",
            ) from error

    def metrics(self) -> dict[str, Any]:
        """Return the staleness of gradients over all servers."""
        total = Staleness()
        for client in self._remote:
            total.add(client.staleness())
        if self._server is not None:
            total.add(self._server.staleness)
        return {"staleness": total.summary(self._max_staleness or None)}

    def abandon(self) -> None:
        """Leave after an error; other workers receive a failure with the next reply of the server on this rank."""
        if self._server is not None:
            self._server.fail(RankError("the worker on its rank has failed.", peer_lost=True))
        self.leave()
