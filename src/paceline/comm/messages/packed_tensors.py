"""Send several tensors, of any dtypes, as one message through a flat buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.messages.flat_view import shaped_like
from paceline.errors import RankError

_NO_TIMEOUT = timedelta(days=30)
"""Practically no time-out. When a receive of Gloo times out, all connections of its group are closed."""
_UNUSED_TAG = 1_000_000
"""Tag that no message is sent with."""


class PackedTensors:
    """A buffer for tensors like the given ones, in main memory for sending and on their device for computing.

    On a CPU both are the same memory. Dtypes are ordered by decreasing item size, so that all are aligned without gaps.
    """

    def __init__(self, likes: Sequence[Tensor], device: torch.device) -> None:
        dtypes = sorted({like.dtype for like in likes}, key=lambda dtype: (-dtype.itemsize, str(dtype)))
        self.bytes = sum(like.nbytes for like in likes)
        """Size of the message."""
        self._device_buffer = torch.empty(self.bytes, dtype=torch.uint8, device=device)
        self._host_buffer = self._device_buffer
        if device.type != "cpu":
            self._host_buffer = torch.empty(self.bytes, dtype=torch.uint8, pin_memory=True)
        self.flats: list[Tensor] = []
        """One tensor per dtype with all items of that dtype, on the device."""
        self.views: list[Tensor] = [like.detach() for like in likes]
        """Views of the tensors, in the given order and layout, on the device."""
        start = 0
        for dtype in dtypes:
            numbers = [number for number, like in enumerate(likes) if like.dtype == dtype]
            flat = self._device_buffer[start : start + sum(likes[n].nbytes for n in numbers)].view(dtype)
            self.flats.append(flat)
            for number, part in zip(numbers, flat.split([likes[n].numel() for n in numbers]), strict=True):
                self.views[number] = shaped_like(part, likes[number])
            start += flat.nbytes

    @torch.no_grad()
    def pack(self, tensors: Sequence[Tensor | None]) -> None:
        """Copy tensors into the buffer; write zeros for None."""
        given = [(view, tensor) for view, tensor in zip(self.views, tensors, strict=True) if tensor is not None]
        if given:
            torch._foreach_copy_([view for view, _ in given], [tensor for _, tensor in given])
        for view, tensor in zip(self.views, tensors, strict=True):
            if tensor is None:
                view.zero_()

    def unpack(self, tensors: Sequence[Tensor]) -> None:
        """Copy the buffer to tensors; if they are fewer, only its first ones."""
        if tensors:
            torch._foreach_copy_(list(tensors), self.views[: len(tensors)])

    def send(self, ranks: Sequence[int], group: dist.ProcessGroup, tag: int = 0) -> list[PackedTransfer]:
        """Start sending the buffer to some ranks. Wait for all transfers before packing it again."""
        if self._host_buffer is not self._device_buffer:
            self._host_buffer.copy_(self._device_buffer)
        transfers = []
        for rank in ranks:
            with naming_peer(rank):
                work = dist.isend(self._host_buffer, group_dst=rank, group=group, tag=tag)
                transfers.append(PackedTransfer(work, rank))
        return transfers

    def receive(self, rank: int, group: dist.ProcessGroup, tag: int = 0) -> PackedTransfer:
        """Start receiving the buffer from a rank. Its content is valid once the transfer has been waited for."""
        with naming_peer(rank):
            return PackedTransfer(dist.irecv(self._host_buffer, group_src=rank, group=group, tag=tag), rank, self)

    def _copy_to_device(self) -> None:
        if self._host_buffer is not self._device_buffer:
            self._device_buffer.copy_(self._host_buffer)


class PackedTransfer:
    """A `PackedTensors` that is being sent or received."""

    def __init__(self, work: dist.Work | None, rank: int, received: PackedTensors | None = None) -> None:
        self._work = work
        self._rank = rank
        self._received = received

    def wait(self, *, has_limit: bool = True) -> None:
        """Wait until the tensors have been sent or received; raise a `RankError` if the peer is lost.

        If the wait `has_limit`, it is that of the group.
        """
        assert self._work is not None, "only ranks outside the group get no work handle"
        with naming_peer(self._rank):
            self._work.wait() if has_limit else self._work.wait(_NO_TIMEOUT)
        if self._received is not None:
            self._received._copy_to_device()


@contextmanager
def naming_peer(rank: int) -> Iterator[None]:
    """Turn an error of Gloo in the `with` block into a `RankError` that names the peer of the message."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rpartition("] ")[2].partition(". ")[0].removesuffix(".")
        raise RankError(
            f"the connection to rank {rank} failed or timed out: {reason}.",
            hint="see the log of that rank for the reason; if it is only slow, increase --timeout",
            peer_lost=True,
        ) from error


def abort_connections(rank: int, group: dist.ProcessGroup) -> None:
    """Close all connections of a group, so that threads that wait for a message in it get an error."""
    with suppress(RuntimeError):
        group.recv([torch.zeros(1)], rank, _UNUSED_TAG).wait(timedelta(milliseconds=1))


def receive_without_timeout(tensor: Tensor, rank: int, group: dist.ProcessGroup, tag: int = 0) -> Tensor:
    """Receive a tensor without a time limit and return it; raise if the connection is closed."""
    work = dist.irecv(tensor, group_src=rank, group=group, tag=tag)
    assert work is not None
    work.wait(_NO_TIMEOUT)
    return tensor
