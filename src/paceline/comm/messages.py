"""Messages between two ranks, on any device: Gloo knows main memory only, so GPU tensors pass through it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.group import Comm


@dataclass(frozen=True)
class Message:
    """A message under way."""

    work: dist.Work
    buffer: Tensor
    """What is on the wire; kept alive until the message has arrived."""
    target: Tensor | None = None
    """Where to put what arrives, when it could not be received in place."""

    def wait(self) -> None:
        """Returns when it has been sent, or is there."""
        self.work.wait()
        if self.target is not None:
            self.target.copy_(self.buffer)


def isend(tensor: Tensor, rank: int, comm: Comm) -> Message:
    """Starts sending a contiguous tensor to a rank."""
    buffer = tensor.cpu() if _needs_main_memory(comm) else tensor
    return Message(comm.group.send([_numbers(buffer)], rank, 0), buffer)


def irecv(tensor: Tensor, rank: int, comm: Comm) -> Message:
    """Starts receiving a contiguous tensor from a rank."""
    staged = _needs_main_memory(comm)
    buffer = torch.empty_like(tensor, device="cpu") if staged else tensor
    return Message(comm.group.recv([_numbers(buffer)], rank, 0), buffer, tensor if staged else None)


def _needs_main_memory(comm: Comm) -> bool:
    return comm.device.type != "cpu" and comm.backend == "gloo"


def _numbers(buffer: Tensor) -> Tensor:
    """What `dist.isend` would hand to the group. Its checks of arguments cost as much as a small message."""
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer
