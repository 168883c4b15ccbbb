"""A server that answers each worker by itself: a thread for each waits for its word and does what it says."""

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
from paceline.strategies.parameter_server.server_weights import ServerReply, ServerWeights
from paceline.strategies.parameter_server.staleness import StalenessBound
from paceline.strategies.parameter_server.synchronous import GRADIENTS, STATES, WEIGHTS, WORDS, ServerShard, to_device

ANSWERS = WORDS + 1
"""One more tag: what a worker is told before it gets weights."""
POLL_S = 0.2
"""How often a server looks whether all have left."""
GRACE_S = 5.0
"""How long workers have to hear that a server has failed, when its process ends."""


class ServerRequest(enum.IntEnum):
    """What a worker wants of a server."""

    PUSH = 0
    """Here are gradients; give me weights."""
    PULL = 1
    """Give me weights."""
    STATE = 2
    """Give me what your optimiser keeps."""
    LOAD = 3
    """Here are weights, and what your optimiser shall keep."""
    FIGURES = 4
    """Tell me how old gradients were."""
    WHY = 5
    """Tell me why you have failed."""
    LEAVE = 6
    """I shall not ask again."""


class AsyncServer:
    """A server that is open: a thread for each worker on another rank."""

    def __init__(self, master: ServerWeights, workers: Sequence[int], comm: Comm, group: dist.ProcessGroup) -> None:
        self.master = master
        self._group = group
        self._device = comm.device
        self._timeout_s = comm.timeout_s
        self._heard_s = {rank: time.monotonic() for rank in workers}
        """When each worker has last said something."""
        self._threads = {
            rank: threading.Thread(target=self._attend, args=(rank,), name=f"paceline-server-{rank}", daemon=True)
            for rank in workers
        }
        for thread in self._threads.values():
            thread.start()
        weakref.finalize(self, end_threads, self._threads, untimed(group))  # At the latest when the process ends.

    def serve(self) -> None:
        """Stays until all workers have left; raises when it has failed, or one is lost."""
        while self._present:
            if self.master.has_failed.wait(POLL_S):
                assert self.master.failure is not None
                raise self.master.failure

    def close(self) -> None:
        """Returns when all workers have left; an error names one that has kept silent for too long."""
        began_s = time.monotonic()
        while present := self._present:
            self._threads[present[0]].join(POLL_S)
            silent_since_s, rank = min((max(began_s, self._heard_s[rank]), rank) for rank in present)
            if time.monotonic() - silent_since_s > self._timeout_s and self._threads[rank].is_alive():
                end_threads(self._threads, untimed(self._group), grace_s=0)
                raise RankError(
                    f"rank {rank} has kept silent for {self._timeout_s:g} s, and has not left the server.",
                    hint="its log says why; --timeout waits longer, and every rank has to close",
                    peer_lost=True,
                )

    @property
    def _present(self) -> list[int]:
        """The workers that have not left."""
        return [rank for rank, thread in self._threads.items() if thread.is_alive()]

    def _attend(self, rank: int) -> None:
        """Serves one worker until it leaves."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            self._serve(rank)
        except Exception as error:  # The others hear of it with their next answer.
            self.master.fail(RankError(f"it has lost rank {rank}: {error}", peer_lost=True))

    def _serve(self, rank: int) -> None:
        master, group = self.master, self._group
        weights = [parameter.detach() for parameter in master.parameters]
        gradients, reply = PackedTensors(weights, self._device), PackedTensors(weights, self._device)
        word, quiet = empty_request(master), untimed(group)
        while True:
            receive_without_timeout(word, rank, quiet, WORDS)  # How long a worker computes is no traffic.
            self._heard_s[rank] = time.monotonic()
            say, version, settings, used = read_request(word, master)
            if say is ServerRequest.LEAVE:
                return
            if say is ServerRequest.PUSH:
                gradients.receive(rank, group, GRADIENTS).wait()
                _answer(rank, master.push(gradients.views, used, settings, version, reply), reply, group)
            elif say is ServerRequest.PULL:
                _answer(rank, master.pull(reply), reply, group)
            elif say is ServerRequest.STATE:
                send_json_message(master.state(), rank, quiet, STATES)
            elif say is ServerRequest.WHY:
                send_json_message({"why": master.why()}, rank, quiet, STATES)
            elif say is ServerRequest.FIGURES:
                send_json_message({"staleness": {"json": json.dumps(master.staleness.to_dict())}}, rank, quiet, STATES)
            else:
                gradients.receive(rank, quiet, WEIGHTS).wait()
                master.load(gradients.views, to_device(receive_json_message(rank, quiet, STATES), self._device))


def end_threads(threads: Mapping[int, threading.Thread], group: dist.ProcessGroup, grace_s: float = GRACE_S) -> None:
    """Leaves none in Gloo, by ending its connections if need be: a process that ends with one there is aborted."""
    own, deadline_s = threading.current_thread(), time.monotonic() + grace_s
    for thread in threads.values():
        if thread is not own:
            thread.join(max(0.0, deadline_s - time.monotonic()))
    left = {rank: thread for rank, thread in threads.items() if thread is not own and thread.is_alive()}
    if left:
        abort_connections(next(iter(left)), group)
    for thread in left.values():
        thread.join(GRACE_S)


def dedicated_server(
    link: ServerShard, optimizer: torch.optim.Optimizer, comm: Comm, bound: StalenessBound
) -> AsyncServer:
    """A server on a rank of its own: it steps the parameters of its own model."""
    link.fetch(0, comm.full_group)
    named = list(zip(link.names, link.parameters, strict=True))
    master = ServerWeights(named, optimizer, comm.world_size, bound, first_ticket=comm.world_size)
    return AsyncServer(master, range(comm.world_size), comm, comm.full_group)


def colocated_server(
    link: ServerShard,
    parameters: NamedParameters,
    make_optimizer: MakeOptimizer,
    comm: Comm,
    group: dist.ProcessGroup,
    bound: StalenessBound,
) -> AsyncServer:
    """A server beside a worker, with weights of its own: the worker's must not change while it computes with them.

    Its optimiser is made for all parameters, so that it has the worker's groups; but only those that it keeps take
    memory, and only they are ever stepped.
    """
    kept = set(link.names)
    own = [(name, nn.Parameter(p.detach().clone() if name in kept else _hollow(p))) for name, p in parameters]
    masters = [(name, parameter) for name, parameter in own if name in kept]
    master = ServerWeights(masters, make_optimizer(own), comm.world_size, bound, first_ticket=comm.world_size)
    others = [rank for rank in range(comm.world_size) if rank != comm.rank]
    return AsyncServer(master, others, comm, group)


def _hollow(parameter: Tensor) -> Tensor:
    """A tensor of the same shape that takes no memory."""
    return parameter.detach().new_zeros(()).expand(parameter.shape)


def untimed(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group inside one that is timed."""
    return group.inner if isinstance(group, TimedGroup) else group


def empty_request(master: ServerWeights) -> Tensor:
    """Room for what a worker says."""
    return torch.zeros(2 + master.settings.count + len(master.names), dtype=torch.float64)


def read_request(word: Tensor, master: ServerWeights) -> tuple[ServerRequest, int, list[float], list[bool]]:
    """What a worker wants, the version of its weights, its settings, and which parameters have gradients."""
    say, version, *rest = word.tolist()
    settings = master.settings.count
    return ServerRequest(int(say)), int(version), rest[:settings], [flag > 0 for flag in rest[settings:]]


def _answer(rank: int, answer: ServerReply, weights: PackedTensors, group: dist.ProcessGroup) -> None:
    told = dist.isend(torch.tensor(answer), group_dst=rank, group=group, tag=ANSWERS)
    assert told is not None
    told.wait()
    for message in weights.send([rank], group, WEIGHTS):
        message.wait()
