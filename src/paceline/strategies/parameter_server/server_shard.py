"""A server's shard of the parameters, with buffers for its messages, and the optimiser state of a shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.packed_tensors import PackedTensors, PackedTransfer
from paceline.strategies.base.strategy import clone_tensors
from paceline.strategies.parameter_server.protocol import GRADIENTS, WEIGHTS


class ServerShard:
    """Parameters that one server keeps, with buffers for the messages between a worker and this server."""

    def __init__(self, server_rank: int, parameters: Sequence[tuple[str, nn.Parameter]], device: torch.device) -> None:
        self.server_rank = server_rank
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        weights = [parameter.detach() for parameter in self.parameters]
        self.gradients = PackedTensors(weights, device)
        self.weights = PackedTensors(weights, device)

    @property
    def is_empty(self) -> bool:
        """Whether the shard has no parameters: there may be more servers than tensors."""
        return not self.weights.bytes

    @property
    def used(self) -> list[bool]:
        """Whether each parameter has a gradient."""
        return [parameter.grad is not None for parameter in self.parameters]

    def pack_gradients(self) -> None:
        """Move the gradients of the last backward pass into their buffer: the worker's optimiser must not use them."""
        self.gradients.pack([parameter.grad for parameter in self.parameters])
        for parameter in self.parameters:
            parameter.grad = None

    def send_gradients(self, group: dist.ProcessGroup) -> PackedTransfer:
        """Start to send the gradients of the last backward pass to the server."""
        self.pack_gradients()
        (message,) = self.gradients.send([self.server_rank], group, GRADIENTS)
        return message

    def unpack_weights(self) -> None:
        """Copy the received weights into the model."""
        self.weights.unpack([parameter.detach() for parameter in self.parameters])

    def send_weights(self, rank: int, group: dist.ProcessGroup) -> None:
        """Send the weights of the model to a rank, which calls `receive_weights`; return when they are sent."""
        if self.is_empty:
            return
        self.weights.pack([parameter.detach() for parameter in self.parameters])
        for message in self.weights.send([rank], group, WEIGHTS):
            message.wait()

    def receive_weights(self, rank: int, group: dist.ProcessGroup) -> None:
        """Receive weights from a rank, which calls `send_weights`, into the model."""
        if self.is_empty:
            return
        self.weights.receive(rank, group, WEIGHTS).wait()
        self.unpack_weights()


def optimizer_state_of(
    names: Sequence[str], parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Any]]:
    """Return a copy of the optimiser state of some parameters, by parameter name."""
    named = zip(names, parameters, strict=True)
    return {
        name: clone_tensors(optimizer.state[parameter]) for name, parameter in named if parameter in optimizer.state
    }


def state_to_device(state: Mapping[str, Mapping[str, Any]], device: torch.device) -> dict[str, dict[str, Any]]:
    """Return an optimiser state on a device; step counts stay in main memory, where PyTorch's optimisers keep them."""
    return {name: {key: _to_device(key, value, device) for key, value in own.items()} for name, own in state.items()}


def _to_device(key: str, value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) and key != "step" else value
