"""Servers that go by rounds: each step waits for the gradients of all workers, and everybody gets the new weights.

A server beside a worker steps the worker's own parameters, by the worker's own optimiser.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.group import Comm
from paceline.comm.packet import Packet, PacketOnTheWay
from paceline.comm.parcel import receive_parcel, send_parcel
from paceline.records.timeline import Purpose

GRADIENTS, WEIGHTS, STATES = range(3)
"""Tags: two ranks that are both worker and server send each other gradients and weights."""
EPSILON = 1e-6
"""As in torch's clip_grad_norm_."""


class Link:
    """A worker's way to one server: what it keeps, and the messages there and back."""

    def __init__(self, home: int, parameters: Sequence[tuple[str, nn.Parameter]], device: torch.device) -> None:
        self.home = home
        """The server's rank."""
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        weights = [parameter.detach() for parameter in self.parameters]
        self.gradients = Packet(weights, device)
        self.weights = Packet(weights, device)

    @property
    def used(self) -> list[bool]:
        """Which parameters have a gradient."""
        return [parameter.grad is not None for parameter in self.parameters]

    def push(self, group: dist.ProcessGroup) -> PacketOnTheWay:
        """Sends the gradients that backward has left."""
        self.gradients.pack([parameter.grad for parameter in self.parameters])
        return self.gradients.send(self.home, group, GRADIENTS)

    def take(self) -> None:
        """Puts the weights that have come into the model."""
        self.weights.unpack([parameter.detach() for parameter in self.parameters])


class Shard:
    """A server's side: it adds up the gradients of all workers, has the optimiser step, and sends the weights."""

    def __init__(self, link: Link, workers: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.link = link
        self._group = group
        self._workers = workers
        weights = [parameter.detach() for parameter in link.parameters]
        self._others = [rank for rank in range(workers) if rank != link.home]
        self._incoming = {rank: Packet(weights, device) for rank in self._others}
        self._arriving: dict[int, PacketOnTheWay] = {}

    def expect(self) -> None:
        """Starts receiving what all workers but its own send."""
        self._arriving = {
            rank: self._incoming[rank].receive(rank, self._group, GRADIENTS) for rank in self._others if self.size
        }

    def add_up(self, used: Sequence[bool]) -> None:
        """Waits for all, and leaves the mean where the optimiser looks for it; nothing for what nobody has used."""
        packets = {self.link.home: self.link.gradients} | self._incoming
        if self.link.home < self._workers:
            self.link.gradients.pack([parameter.grad for parameter in self.link.parameters])
        total, *rest = [packets[rank] for rank in range(self._workers)]
        for message in self._arriving.values():
            message.wait()
        for packet in rest:  # In the order of ranks: the same sum to the last bit, whoever comes first.
            total.add(packet)
        if total.flats:
            torch._foreach_div_(total.flats, self._workers)
        for parameter, mean, anywhere in zip(self.link.parameters, total.views, used, strict=True):
            parameter.grad = mean if anywhere else None

    def squared_norm(self) -> Tensor:
        """Of the mean gradients that it keeps."""
        gradients = [p.grad for p in self.link.parameters if p.grad is not None]
        squares = [gradient.double().square().sum() for gradient in gradients]
        return torch.stack(squares).sum().cpu().reshape(1) if squares else torch.zeros(1, dtype=torch.float64)

    def scale(self, factor: float) -> None:
        """Multiplies the gradients."""
        torch._foreach_mul_([p.grad for p in self.link.parameters if p.grad is not None], factor)

    def reply(self) -> list[PacketOnTheWay]:
        """Starts sending the weights to all workers but its own."""
        if not self.size:
            return []
        self.link.weights.pack([parameter.detach() for parameter in self.link.parameters])
        return [self.link.weights.send(rank, self._group, WEIGHTS) for rank in self._others]

    @property
    def size(self) -> int:
        """In bytes."""
        return self.link.weights.bytes


def clip_factor(max_norm: float, squared_norm: Tensor) -> float:
    """What gradients are multiplied by, as torch's clip_grad_norm_ does."""
    return min(1.0, max_norm / (math.sqrt(float(squared_norm)) + EPSILON))


class Rounds:
    """A worker under servers that wait for all workers, and the server on its rank if there is one."""

    def __init__(
        self, links: Sequence[Link], optimizer: torch.optim.Optimizer, comm: Comm, update: Callable[[], None]
    ) -> None:
        self._links = links
        self._optimizer = optimizer
        self._comm = comm
        self._update = update
        self._remote = [link for link in links if link.home != comm.rank and link.names]
        own = [link for link in links if link.home == comm.rank]
        self._shard = Shard(own[0], comm.world_size, comm.group, comm.device) if own else None

    @property
    def ticket(self) -> int:
        """Nobody asks: all step together."""
        raise NotImplementedError

    def step(self, max_norm: float | None) -> None:
        """Sends gradients, steps what this rank keeps, and gets the weights of the rest."""
        group, own = self._comm.group, self._shard
        with self._comm.carrying(Purpose.WEIGHTS):
            arriving = [link.weights.receive(link.home, group, WEIGHTS) for link in self._remote]
        if own is not None:
            own.expect()
        leaving = [link.push(group) for link in self._remote]
        for link in self._remote:
            for parameter in link.parameters:  # Not this rank's to step.
                parameter.grad = None
        if own is not None:
            own.add_up(own.link.used)
        if max_norm is not None:
            self._clip(max_norm)
        self._update()
        if own is not None:
            with self._comm.carrying(Purpose.WEIGHTS):
                leaving += own.reply()
        for link, weights in zip(self._remote, arriving, strict=True):
            weights.wait()
            link.take()
        for message in leaving:
            message.wait()

    def finish(self) -> None:
        """A step leaves nothing in flight."""

    def state(self) -> dict[str, dict[str, Any]]:
        """What all servers' optimisers keep, on every rank."""
        found: dict[str, dict[str, Any]] = {}
        for link in self._links:
            if link.home == self._comm.rank:
                kept = kept_for(link.names, link.parameters, self._optimizer)
                for rank in range(self._comm.world_size):
                    if rank != link.home:
                        send_parcel(kept, rank, self._comm.group, STATES)
            else:
                kept = to_device(receive_parcel(link.home, self._comm.group, STATES), self._comm.device)
            found |= kept
        return found

    def load(self, kept: Mapping[str, Mapping[str, Any]]) -> None:  # noqa: ARG002
        """Forgets what the optimiser was given for parameters that others step."""
        for link in self._remote:
            for parameter in link.parameters:
                self._optimizer.state.pop(parameter, None)

    def figures(self) -> dict[str, Any]:
        """In step, no gradient is late."""
        return {}

    def close(self) -> None:
        """Nothing goes on between steps."""

    def _clip(self, max_norm: float) -> None:
        """Clips by the norm over all servers, of which each knows a part."""
        own = torch.zeros(1, dtype=torch.float64) if self._shard is None else self._shard.squared_norm()
        whole = own if len(self._links) == 1 else self._comm.sum(own)
        if self._shard is not None:
            self._shard.scale(clip_factor(max_norm, whole))


def kept_for(
    names: Sequence[str], parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Any]]:
    """What an optimiser keeps for some parameters, by their names."""
    named = zip(names, parameters, strict=True)
    return {name: copies(optimizer.state[parameter]) for name, parameter in named if parameter in optimizer.state}


def copies(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with tensors of their own."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in values.items()}


def to_device(kept: Mapping[str, Mapping[str, Any]], device: torch.device) -> dict[str, dict[str, Any]]:
    """What an optimiser keeps, where it is used; counts of steps stay in main memory, as optimisers have them."""
    return {name: {key: _moved(key, value, device) for key, value in values.items()} for name, values in kept.items()}


def _moved(key: str, value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) and key != "step" else value
