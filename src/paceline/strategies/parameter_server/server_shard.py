"""A server's shard of the parameters, with buffers for its messages, and the optimiser state of a shard."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.comm.messages.packed_tensors import PackedTensors, PackedTransfer
from paceline.plans.parameter_server import MARK_BYTES
from paceline.strategies.base.optimizer_state import clone_tensors
from paceline.strategies.parameter_server.protocol import GRADIENTS, WEIGHTS
from paceline.strategies.parameter_server.step_marks import StepMark, Verdict


class ServerShard:
    """Parameters that one server keeps, with buffers for the messages between a worker and this server."""

    def __init__(
        self,
        server_rank: int,
        parameters: Sequence[tuple[str, nn.Parameter]],
        device: torch.device,
        *,
        has_marks: bool = False,
    ) -> None:
        """Make the buffers; with `has_marks`, messages end with a `StepMark` or a `Verdict`."""
        self.server_rank = server_rank
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self._device = device
        self._has_marks = has_marks and bool(parameters)
        self.mark = StepMark()
        """Mark of this worker's current step."""
        self.gradients = self.make_buffer()
        self.weights = self.make_buffer()
        """Weights of the last message: those that this worker should compute its gradients with."""
        self._versions: list[int] = []
        """PyTorch's version counters of the parameters when the weights of the last message were in them."""

    def make_buffer(self) -> PackedTensors:
        """Return a buffer for a message of gradients or weights."""
        marks = [torch.zeros(MARK_BYTES // 8, dtype=torch.int64, device=self._device)] if self._has_marks else []
        return PackedTensors([*(parameter.detach() for parameter in self.parameters), *marks], self._device)

    def mark_of(self, gradients: PackedTensors) -> StepMark:
        """Return the mark in a message of gradients."""
        return StepMark(*gradients.views[-1].tolist()) if self._has_marks else StepMark()

    @property
    def verdict(self) -> Verdict:
        """Result of comparing the workers' marks, in the last message of weights."""
        return Verdict(*self.weights.views[-1].tolist()) if self._has_marks else Verdict()

    @property
    def is_empty(self) -> bool:
        """Whether the shard has no parameters: there may be more servers than tensors."""
        return not self.parameters

    @property
    def used(self) -> list[bool]:
        """Whether each parameter has a gradient."""
        return [parameter.grad is not None for parameter in self.parameters]

    def pack_gradients(self) -> None:
        """Move the gradients of the last backward pass into their buffer: the worker's optimiser must not use them."""
        self.gradients.pack([*(parameter.grad for parameter in self.parameters), *self._packable(self.mark)])
        for parameter in self.parameters:
            parameter.grad = None

    def send_gradients(self, group: dist.ProcessGroup) -> PackedTransfer:
        """Start to send the gradients of the last backward pass to the server."""
        self.pack_gradients()
        (message,) = self.gradients.send([self.server_rank], group, GRADIENTS)
        return message

    def pack_weights(self, parameters: Sequence[Tensor], verdict: Verdict | None = None) -> None:
        """Copy weights into their buffer, with the result of comparing the workers' marks."""
        weights = [parameter.detach() for parameter in parameters]
        self.weights.pack([*weights, *self._packable(verdict or Verdict())])

    def unpack_weights(self) -> None:
        """Copy the received weights into the model."""
        self.weights.unpack([parameter.detach() for parameter in self.parameters])

    def record_weights(self) -> None:
        """Record that the model has the weights of the last message."""
        self._versions = [parameter._version for parameter in self.parameters]

    def accept_weights(self) -> None:
        """Take the model's weights for those of the last message: the server has the same."""
        self.pack_weights(self.parameters)
        self.record_weights()

    def changed_weights(self) -> list[str]:
        """Return the names of weights that are not those of the last message.

        Only weights whose version counter has moved are compared. Writes to `parameter.data` do not move it.
        """
        versions = [parameter._version for parameter in self.parameters]
        if versions == self._versions:
            return []
        last_weights = self.weights.views[: len(versions)]
        found = zip(self.names, self.parameters, last_weights, versions, self._versions, strict=True)
        return [name for name, own, last, now, before in found if now != before and not torch.equal(own, last)]

    def weights_checksum(self) -> int:
        """Return a checksum of the model's weights."""
        checksum = 0
        for parameter in self.parameters:
            flat = parameter.detach().cpu().contiguous().reshape(-1)
            checksum = zlib.crc32(flat.view(torch.uint8).numpy().data, checksum)
        return checksum

    def send_weights(self, rank: int, group: dist.ProcessGroup) -> None:
        """Send the weights of the model to a rank, which calls `receive_weights`; return when they are sent."""
        if self.is_empty:
            return
        self.pack_weights(self.parameters)
        for message in self.weights.send([rank], group, WEIGHTS):
            message.wait()

    def receive_weights(self, rank: int, group: dist.ProcessGroup) -> None:
        """Receive weights from a rank, which calls `send_weights`, into the model.

        There is no time limit: the rank may be reading a checkpoint, to resume from it.
        """
        if self.is_empty:
            return
        self.weights.receive(rank, group, WEIGHTS).wait(has_limit=False)
        self.unpack_weights()

    def _packable(self, mark: StepMark | Verdict) -> list[Tensor]:
        """Return a mark as a tensor for a buffer; none if messages have no marks."""
        return [torch.tensor(mark, dtype=torch.int64, device=self._device)] if self._has_marks else []


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
