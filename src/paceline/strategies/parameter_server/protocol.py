"""Protocol between workers and servers: requests, replies and tags, the same under both policies.

A server serves groups of workers. Synchronous workers are one group; each asynchronous worker is a group of its own.
One worker of a group, its lead, sends the requests. A server beside a worker of the group needs no lead: that worker
calls it.

    lead          ──request──▶    server    PUSH, PULL, STATE, LOAD, STALENESS, FAILURE or LEAVE
    each worker   ──gradients──▶  server    after PUSH
    each worker   ◀──weights───   server    after PUSH and PULL
    lead          ◀──reply─────   server    with the weights: their version, and the next ticket

Synchronous messages of gradients and weights end with marks (`step_marks.py`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.messages.packed_tensors import PackedTransfer, naming_peer, receive_without_timeout
from paceline.plans.parameter_server import REPLY_BYTES, REQUEST_BYTES

GRADIENTS, WEIGHTS, STATES, NORMS, REQUESTS, REPLIES = range(6)
"""Message tags. Two ranks that are both worker and server send each other gradients and weights."""


class RequestKind(enum.IntEnum):
    """Kind of a request to a server."""

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
    """Expect no more requests from this group."""


@dataclass(frozen=True)
class ServerRequest:
    """Request of a group of workers to a server."""

    kind: RequestKind
    version: int = 0
    """Version of the weights that the gradients were computed with."""
    max_norm: float | None = None
    """Norm to clip the gradients to."""
    settings: Sequence[float] = ()
    """Settings of the workers' optimiser; empty if they are those of the last request."""
    used: Sequence[bool] = ()
    """Whether each parameter has a gradient; empty if all have one."""

    def start_sending(self, rank: int, group: dist.ProcessGroup) -> list[PackedTransfer]:
        """Start to send the request to a server; usually it is one message of `REQUEST_BYTES`.

        Settings and `used` follow in a second message, `used` only together with the settings.
        """
        max_norm = math.nan if self.max_norm is None else self.max_norm
        details = torch.tensor([*self.settings, *map(float, self.used)], dtype=torch.float64)
        header = torch.tensor([self.kind, self.version, max_norm, details.numel()], dtype=torch.float64)
        assert header.nbytes == REQUEST_BYTES
        return [start_sending(part, rank, group, REQUESTS) for part in (header, details) if part.numel()]

    @classmethod
    def receive(cls, rank: int, group: dist.ProcessGroup, settings: int) -> ServerRequest:
        """Receive a request from a lead, without a time limit; `settings` is the number of settings."""
        header = receive_without_timeout(torch.zeros(REQUEST_BYTES // 8, dtype=torch.float64), rank, group, REQUESTS)
        kind, version, max_norm, count = header.tolist()
        details: list[float] = []
        if count:
            empty = torch.zeros(int(count), dtype=torch.float64)
            details = receive_without_timeout(empty, rank, group, REQUESTS).tolist()
        return cls(
            RequestKind(int(kind)),
            int(version),
            None if math.isnan(max_norm) else max_norm,
            details[:settings],
            [flag > 0 for flag in details[settings:]],
        )


class ServerReply(NamedTuple):
    """Reply of a server to the lead of a group, sent with the weights."""

    version: int
    """Number of updates in the weights."""
    ticket: int
    """Share of the data that the lead trains next; only the first server's ticket is used, if asynchronous."""
    failed: bool = False
    """Whether the server has failed or lost a worker; the weights are then not valid."""

    def start_sending(self, rank: int, group: dist.ProcessGroup) -> PackedTransfer:
        """Start to send the reply to the lead of a group."""
        return start_sending(torch.tensor(self, dtype=torch.int64), rank, group, REPLIES)

    @classmethod
    def empty(cls) -> Tensor:
        """Return a tensor to receive a reply into, for `read`."""
        return torch.zeros(REPLY_BYTES // 8, dtype=torch.int64)

    @classmethod
    def read(cls, received: Tensor) -> ServerReply:
        """Return the reply in a received tensor."""
        version, ticket, failed = received.tolist()
        return cls(version, ticket, bool(failed))


class ServerFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Failure of a server, for the workers."""

    reason: str
    detail: str | None
    """Traceback on the server's rank; None where the reason says all."""
    peer_lost: bool
    """Whether the server failed because it lost the connection to another rank."""


def start_sending(tensor: Tensor, rank: int, group: dist.ProcessGroup, tag: int) -> PackedTransfer:
    """Start to send a small tensor to a rank."""
    with naming_peer(rank):
        return PackedTransfer(dist.isend(tensor, group_dst=rank, group=group, tag=tag), rank)


def start_receiving(tensor: Tensor, rank: int, group: dist.ProcessGroup, tag: int) -> PackedTransfer:
    """Start to receive a small tensor from a rank."""
    with naming_peer(rank):
        return PackedTransfer(dist.irecv(tensor, group_src=rank, group=group, tag=tag), rank)
