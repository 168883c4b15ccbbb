"""Synchronous server: waits for the gradients of all workers, averages them, steps, and sends the new weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.group import Comm
from paceline.comm.json_messages import receive_json_message
from paceline.comm.packed_tensors import PackedTensors, PackedTransfer, receive_without_timeout
from paceline.plans.parameter_server import REQUEST_BYTES
from paceline.strategies.parameter_server.optimizer_settings import OptimizerSettings
from paceline.strategies.parameter_server.server_shard import (
    GRADIENTS,
    NORMS,
    REQUESTS,
    STATES,
    WEIGHTS,
    ServerShard,
    send_optimizer_state,
    state_to_device,
)

STEP, SETTINGS, STATE, LOAD, LEAVE = range(5)
"""Requests of worker 0 to a server on a separate rank."""
REQUEST_NUMBERS = REQUEST_BYTES // 8
"""Numbers in a request, each of 8 bytes."""
CLIP_EPSILON = 1e-6
"""Same value as in torch's clip_grad_norm_."""


class ShardReducer:
    """Server side of a shard: averages the gradients of all workers and sends the new weights."""

    def __init__(self, shard: ServerShard, workers: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.shard = shard
        self._group = group
        self._workers = workers
        weights = [parameter.detach() for parameter in shard.parameters]
        self._others = [rank for rank in range(workers) if rank != shard.server_rank]
        self._received = {rank: PackedTensors(weights, device) for rank in self._others}
        self._receiving: dict[int, PackedTransfer] = {}

    def start_receiving(self) -> None:
        """Start to receive the gradients of all workers on other ranks."""
        self._receiving = {
            rank: self._received[rank].receive(rank, self._group, GRADIENTS)
            for rank in self._others
            if not self.shard.is_empty
        }

    def average(self, used: Sequence[bool]) -> None:
        """Wait for all gradients and set each parameter's `grad` to the mean, or to None if no worker used it."""
        gradients = {self.shard.server_rank: self.shard.gradients} | self._received
        if self.shard.server_rank < self._workers:
            self.shard.gradients.pack([parameter.grad for parameter in self.shard.parameters])
        total, *rest = [gradients[rank] for rank in range(self._workers)]
        for message in self._receiving.values():
            message.wait()
        for packed in rest:  # In rank order, so that the sum is bitwise the same in any order of arrival.
            total.add(packed)
        if total.flats:
            torch._foreach_div_(total.flats, self._workers)
        for parameter, mean, is_used in zip(self.shard.parameters, total.views, used, strict=True):
            parameter.grad = mean if is_used else None

    def squared_norm(self) -> Tensor:
        """Return the squared norm of this shard's mean gradients, as a float64 CPU tensor of one element."""
        gradients = [p.grad for p in self.shard.parameters if p.grad is not None]
        squares = [gradient.double().square().sum() for gradient in gradients]
        return torch.stack(squares).sum().cpu().reshape(1) if squares else torch.zeros(1, dtype=torch.float64)

    def scale(self, factor: float) -> None:
        """Multiply the gradients by a factor; the shard, or this step, may have none."""
        gradients = [p.grad for p in self.shard.parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def start_sending_weights(self) -> list[PackedTransfer]:
        """Start to send the weights to all workers on other ranks."""
        if self.shard.is_empty:
            return []
        self.shard.weights.pack([parameter.detach() for parameter in self.shard.parameters])
        return self.shard.weights.send(self._others, self._group, WEIGHTS)


def clip_factor(max_norm: float, squared_norm: Tensor) -> float:
    """Return the factor by which torch's clip_grad_norm_ multiplies gradients of this squared norm."""
    return min(1.0, max_norm / (math.sqrt(float(squared_norm)) + CLIP_EPSILON))


class SyncServer:
    """Synchronous server on a separate rank. It steps its own model's parameters on requests from worker 0."""

    def __init__(
        self, shard: ServerShard, optimizer: torch.optim.Optimizer, comm: Comm, update: Callable[[], None]
    ) -> None:
        self._shard = shard
        self._optimizer = optimizer
        self._comm = comm
        self._group = comm.full_group
        self._update = update
        self._settings = OptimizerSettings(optimizer)
        self._reducer = ShardReducer(shard, comm.world_size, self._group, comm.device)
        shard.receive_weights(0, self._group)

    def serve(self) -> None:
        """Execute the requests of worker 0 until it sends LEAVE."""
        while True:
            request, number, flag, _ = self._receive(torch.zeros(REQUEST_NUMBERS, dtype=torch.float64)).tolist()
            if request == LEAVE:
                return
            if request == STEP:
                self._step(None if math.isnan(number) else number, has_unused=flag > 0)
            elif request == SETTINGS:
                self._settings.write(self._receive(torch.zeros(int(number), dtype=torch.float64)).tolist())
            elif request == STATE:
                send_optimizer_state(self._shard, self._optimizer, self._comm, self._group)
            else:
                self._load()

    def _step(self, max_norm: float | None, *, has_unused: bool) -> None:
        self._reducer.start_receiving()
        used = [True] * len(self._shard.names)
        if has_unused and used:
            used = self._receive(torch.zeros(len(used), dtype=torch.uint8)).bool().tolist()
        self._reducer.average(used)
        if max_norm is not None:
            self._reducer.scale(clip_factor(max_norm, self._total_squared_norm()))
        self._update()
        for message in self._reducer.start_sending_weights():
            message.wait()

    def _total_squared_norm(self) -> Tensor:
        """Return the squared norm over all servers; each server sends its own to all others."""
        own = self._reducer.squared_norm()
        first = self._comm.world_size
        others = [rank for rank in range(first, first + self._comm.servers) if rank != self._comm.rank]
        sending = [dist.isend(own, group_dst=rank, group=self._group, tag=NORMS) for rank in others]
        received = {rank: torch.zeros_like(own) for rank in others}
        for rank in others:
            dist.recv(received[rank], group_src=rank, group=self._group, tag=NORMS)
        for message in sending:
            assert message is not None
            message.wait()
        norms = received | {self._comm.rank: own}
        return torch.stack([norms[rank] for rank in sorted(norms)]).sum()

    def _load(self) -> None:
        self._shard.receive_weights(0, self._group)
        state = state_to_device(receive_json_message(0, self._group, STATES), self._comm.device)
        for name, parameter in zip(self._shard.names, self._shard.parameters, strict=True):
            self._optimizer.state[parameter] = state[name]

    def _receive(self, tensor: Tensor) -> Tensor:
        return receive_without_timeout(tensor, 0, self._group, REQUESTS)
