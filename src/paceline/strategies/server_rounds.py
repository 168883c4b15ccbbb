"""Servers that go by rounds: each step waits for the gradients of all workers, and everybody gets the new weights.

A server beside a worker steps the worker's own parameters, by the worker's own optimiser.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.packet import Packet, PacketOnTheWay

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
