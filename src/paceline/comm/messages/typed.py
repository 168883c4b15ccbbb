"""Messages between two ranks on any device. Gloo sends from main memory only, so GPU tensors are copied there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.group import Comm


@dataclass(frozen=True)
class Message:
    """A message that is being sent or received."""

    work: dist.Work
    buffer: Tensor
    """Memory that is sent or received into; kept alive until the message has completed."""
    target: Tensor | None = None
    """Tensor to copy the received buffer to, if it could not be received in place."""

    def wait(self) -> None:
        """Wait until the message has been sent or received."""
        self.work.wait()
        if self.target is not None:
            self.target.copy_(self.buffer)


def isend(tensor: Tensor, rank: int, comm: Comm) -> Message:
    """Start sending a contiguous tensor to a rank."""
    buffer = tensor.cpu() if _needs_main_memory(comm) else tensor
    return Message(comm.group.send([_as_real(buffer)], rank, 0), buffer)


def irecv(tensor: Tensor, rank: int, comm: Comm) -> Message:
    """Start receiving a contiguous tensor from a rank."""
    staged = _needs_main_memory(comm)
    buffer = torch.empty_like(tensor, device="cpu") if staged else tensor
    return Message(comm.group.recv([_as_real(buffer)], rank, 0), buffer, tensor if staged else None)


def _needs_main_memory(comm: Comm) -> bool:
    return comm.device.type != "cpu" and comm.backend == "gloo"


def _as_real(buffer: Tensor) -> Tensor:
    """Return the tensor that `dist.isend` would pass to the group. Its argument checks cost as much as a message."""
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer
