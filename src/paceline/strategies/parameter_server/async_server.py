"""Asynchronous server: one thread per worker receives its requests and replies at once, without other workers."""

from __future__ import annotations

import enum
import json
import threading
import time
import weakref
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.group import Comm
from paceline.comm.json_messages import receive_json_message, send_json_message
from paceline.comm.packed_tensors import PackedTensors, abort_connections, receive_without_timeout
from paceline.comm.timed_group import TimedGroup
from paceline.errors import RankError
from paceline.strategies.base.strategy import MakeOptimizer, NamedParameters
from paceline.strategies.parameter_server.server_shard import (
    GRADIENTS,
    REPLIES,
    REQUESTS,
    STATES,
    WEIGHTS,
    ServerShard,
    state_to_device,
)
from paceline.strategies.parameter_server.server_weights import ServerReply, ServerWeights
from paceline.strategies.parameter_server.staleness import StalenessBound

POLL_S = 0.2
"""Seconds between two checks whether all workers have left."""
GRACE_S = 5.0
"""Seconds in which workers can still receive a server's failure before its process ends."""


class ServerRequest(enum.IntEnum):
    """Request of a worker to an asynchronous server."""

    PUSH = 0
    """Step with the gradients that follow, and send the new weights."""
    PULL = 1
    """Send the current weights."""
    STATE = 2
    """Send the optimiser state."""
    LOAD = 3
    """Continue from the weights and the optimiser state that follow."""
    STALENESS = 4
    """Send the staleness of the gradients so far."""
    FAILURE = 5
    """Send the reason of the server's failure."""
    LEAVE = 6
    """Expect no more requests from this worker."""


class AsyncServer:
    """Asynchronous server, with one thread for each worker on another rank."""

    def __init__(self, weights: ServerWeights, workers: Sequence[int], comm: Comm, group: dist.ProcessGroup) -> None:
        self.weights = weights
        self._group = group
        self._device = comm.device
        self._timeout_s = comm.timeout_s
        self._last_request_s = {rank: time.monotonic() for rank in workers}
        """Time of each worker's last request."""
        self._threads = {
            rank: threading.Thread(target=self._run_thread, args=(rank,), name=f"paceline-server-{rank}", daemon=True)
            for rank in workers
        }
        for thread in self._threads.values():
            thread.start()
        # At the latest when the process ends.
        weakref.finalize(self, join_threads, self._threads, untimed_group(group))

    def serve(self) -> None:
        """Serve until all workers have left; raise if the server fails or loses a worker."""
        while self._connected:
            if self.weights.has_failed.wait(POLL_S):
                assert self.weights.failure is not None
                raise self.weights.failure

    def close(self) -> None:
        """Wait until all workers have left; raise a RankError that names a worker without a request for too long."""
        began_s = time.monotonic()
        while connected := self._connected:
            self._threads[connected[0]].join(POLL_S)
            silent_since_s, rank = min((max(began_s, self._last_request_s[rank]), rank) for rank in connected)
            if time.monotonic() - silent_since_s > self._timeout_s and self._threads[rank].is_alive():
                join_threads(self._threads, untimed_group(self._group), grace_s=0)
                raise RankError(
                    f"rank {rank} sent no request for {self._timeout_s:g} s and has not left the server.",
                    hint="see its log for the reason; every rank must call close(), and --timeout sets the limit",
                    peer_lost=True,
                )

    @property
    def _connected(self) -> list[int]:
        """Workers that have not left."""
        return [rank for rank, thread in self._threads.items() if thread.is_alive()]

    def _run_thread(self, rank: int) -> None:
        """Serve one worker until it leaves; an error becomes the failure of the server."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            self._serve_worker(rank)
        except Exception as error:  # The other workers receive it with their next reply.
            self.weights.fail(RankError(f"it lost the connection to rank {rank}: {error}", peer_lost=True))

    def _serve_worker(self, rank: int) -> None:
        weights, group = self.weights, self._group
        tensors = [parameter.detach() for parameter in weights.parameters]
        received, reply = PackedTensors(tensors, self._device), PackedTensors(tensors, self._device)
        message, untimed = empty_request(weights), untimed_group(group)
        while True:
            # Untimed: the wait for a request is the worker's compute time, not communication.
            receive_without_timeout(message, rank, untimed, REQUESTS)
            self._last_request_s[rank] = time.monotonic()
            request, version, settings, used = read_request(message, weights)
            if request is ServerRequest.LEAVE:
                return
            if request is ServerRequest.PUSH:
                received.receive(rank, group, GRADIENTS).wait()
                _send_reply(rank, weights.push(received.views, used, settings, version, reply), reply, group)
            elif request is ServerRequest.PULL:
                _send_reply(rank, weights.pull(reply), reply, group)
            elif request is ServerRequest.STATE:
                send_json_message(weights.state(), rank, untimed, STATES)
            elif request is ServerRequest.FAILURE:
                send_json_message({"failure": weights.describe_failure()}, rank, untimed, STATES)
            elif request is ServerRequest.STALENESS:
                counts = json.dumps(weights.staleness.to_dict())
                send_json_message({"staleness": {"json": counts}}, rank, untimed, STATES)
            else:
                received.receive(rank, untimed, WEIGHTS).wait()
                weights.load(received.views, state_to_device(receive_json_message(rank, untimed, STATES), self._device))


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


def start_dedicated_server(
    shard: ServerShard, optimizer: torch.optim.Optimizer, comm: Comm, bound: StalenessBound
) -> AsyncServer:
    """Start a server on a separate rank; it steps the parameters of its own model."""
    shard.receive_weights(0, comm.full_group)
    named = list(zip(shard.names, shard.parameters, strict=True))
    weights = ServerWeights(named, optimizer, comm.world_size, bound, first_ticket=comm.world_size)
    return AsyncServer(weights, range(comm.world_size), comm, comm.full_group)


def start_colocated_server(
    shard: ServerShard,
    parameters: NamedParameters,
    make_optimizer: MakeOptimizer,
    comm: Comm,
    group: dist.ProcessGroup,
    bound: StalenessBound,
) -> AsyncServer:
    """Start a server beside a worker, with a separate copy of its shard's weights.

    The worker's weights must not change while it computes with them. The server's optimiser is created for all
    parameters, so that it has the same parameter groups as the worker's. Only the parameters of the shard take memory,
    and only they are stepped.
    """
    names = set(shard.names)
    copied = [(name, nn.Parameter(p.detach().clone() if name in names else _placeholder(p))) for name, p in parameters]
    kept = [(name, parameter) for name, parameter in copied if name in names]
    weights = ServerWeights(kept, make_optimizer(copied), comm.world_size, bound, first_ticket=comm.world_size)
    others = [rank for rank in range(comm.world_size) if rank != comm.rank]
    return AsyncServer(weights, others, comm, group)


def _placeholder(parameter: Tensor) -> Tensor:
    """Return a tensor of the parameter's shape that takes no memory."""
    return parameter.detach().new_zeros(()).expand(parameter.shape)


def untimed_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the process group inside a timed one, or the group itself."""
    return group.inner if isinstance(group, TimedGroup) else group


def empty_request(weights: ServerWeights) -> Tensor:
    """Return a tensor to receive a request into."""
    return torch.zeros(2 + weights.settings.count + len(weights.names), dtype=torch.float64)


def read_request(message: Tensor, weights: ServerWeights) -> tuple[ServerRequest, int, list[float], list[bool]]:
    """Return the request, the version of the worker's weights, its settings, and which parameters have gradients."""
    request, version, *rest = message.tolist()
    settings = weights.settings.count
    return ServerRequest(int(request)), int(version), rest[:settings], [flag > 0 for flag in rest[settings:]]


def _send_reply(rank: int, reply: ServerReply, weights: PackedTensors, group: dist.ProcessGroup) -> None:
    sending = dist.isend(torch.tensor(reply), group_dst=rank, group=group, tag=REPLIES)
    assert sending is not None
    sending.wait()
    for message in weights.send([rank], group, WEIGHTS):
        message.wait()
