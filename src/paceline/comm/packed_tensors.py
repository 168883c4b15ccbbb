"""Several tensors as one message: a flat buffer that they are copied into and out of, whatever their types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.flat_view import flat_view
from paceline.errors import RankError

_VERY_LONG = timedelta(days=30)
"""A receive of Gloo that runs out of time ends all connections of its group."""
_NEVER_SENT = 1_000_000
"""A tag."""


class PackedTensors:
    """A buffer for tensors like those given, in main memory for the wire and on their device for computing.

    On a CPU the two are one. Types are in the order of their size, so that each begins where it may without a gap.
    """

    def __init__(self, likes: Sequence[Tensor], device: torch.device) -> None:
        dtypes = sorted({like.dtype for like in likes}, key=lambda dtype: (-dtype.itemsize, str(dtype)))
        self.bytes = sum(like.nbytes for like in likes)
        """Of the message."""
        self._whole = torch.empty(self.bytes, dtype=torch.uint8, device=device)
        on_gpu = device.type != "cpu"
        self._wire = torch.empty(self.bytes, dtype=torch.uint8, pin_memory=True) if on_gpu else self._whole
        self.flats: list[Tensor] = []
        """All tensors of one type, one after the other, on the device."""
        self.views: list[Tensor] = [like.detach() for like in likes]
        """The tensors, in the order and the layout in which they were given, on the device."""
        start = 0
        for dtype in dtypes:
            numbers = [number for number, like in enumerate(likes) if like.dtype == dtype]
            flat = self._whole[start : start + sum(likes[n].nbytes for n in numbers)].view(dtype)
            self.flats.append(flat)
            for number, part in zip(numbers, flat.split([likes[n].numel() for n in numbers]), strict=True):
                self.views[number] = _as(part, likes[number])
            start += flat.nbytes

    @torch.no_grad()
    def pack(self, tensors: Sequence[Tensor | None]) -> None:
        """Copies tensors in; zeros for one that there is not."""
        there = [(view, tensor) for view, tensor in zip(self.views, tensors, strict=True) if tensor is not None]
        if there:
            torch._foreach_copy_([view for view, _ in there], [tensor for _, tensor in there])
        for view, tensor in zip(self.views, tensors, strict=True):
            if tensor is None:
                view.zero_()

    def unpack(self, tensors: Sequence[Tensor]) -> None:
        """Copies them out."""
        if self.views:
            torch._foreach_copy_(list(tensors), self.views)

    def add(self, other: PackedTensors) -> None:
        """Adds what another packet holds."""
        if self.flats:
            torch._foreach_add_(self.flats, other.flats)

    def send(self, ranks: Sequence[int], group: dist.ProcessGroup, tag: int = 0) -> list[PackedTransfer]:
        """Starts sending it to some ranks; it must not be packed again before that has been waited for."""
        if self._wire is not self._whole:
            self._wire.copy_(self._whole)
        leaving = []
        for rank in ranks:
            with naming_peer(rank):
                leaving.append(PackedTransfer(dist.isend(self._wire, group_dst=rank, group=group, tag=tag), rank))
        return leaving

    def receive(self, rank: int, group: dist.ProcessGroup, tag: int = 0) -> PackedTransfer:
        """Starts receiving it from a rank; its content counts once that has been waited for."""
        with naming_peer(rank):
            return PackedTransfer(dist.irecv(self._wire, group_src=rank, group=group, tag=tag), rank, self)

    def _has_come(self) -> None:
        if self._wire is not self._whole:
            self._whole.copy_(self._wire)


class PackedTransfer:
    """A packet that is being sent or received."""

    def __init__(self, work: dist.Work | None, rank: int, expected: PackedTensors | None = None) -> None:
        self._work = work
        self._rank = rank
        self._expected = expected

    def wait(self) -> None:
        """Returns when it has been sent, or is there."""
        assert self._work is not None, "only a rank outside the group gets no handle"
        with naming_peer(self._rank):
            self._work.wait()
        if self._expected is not None:
            self._expected._has_come()


@contextmanager
def naming_peer(rank: int) -> Iterator[None]:
    """Goes around a message to or from a rank: an error of Gloo's becomes one that names it."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rpartition("] ")[2].partition(". ")[0].removesuffix(".")
        raise RankError(
            f"rank {rank} is gone, or has kept silent for too long: {reason}.",
            hint="its log says why; --timeout waits longer for one that is late",
            peer_lost=True,
        ) from error


def abort_connections(rank: int, group: dist.ProcessGroup) -> None:
    """Ends all connections of a group that has this rank and others, so that threads that wait in one get an error."""
    with suppress(RuntimeError):
        group.recv([torch.zeros(1)], rank, _NEVER_SENT).wait(timedelta(milliseconds=1))


def receive_when_sent(tensor: Tensor, rank: int, group: dist.ProcessGroup, tag: int = 0) -> Tensor:
    """Receives what a rank may send in a moment or in an hour; raises when it is gone. Returns the tensor."""
    work = dist.irecv(tensor, group_src=rank, group=group, tag=tag)
    assert work is not None
    work.wait(_VERY_LONG)
    return tensor


def _as(part: Tensor, like: Tensor) -> Tensor:
    """A piece of a flat tensor in the shape of another, and in its memory layout where that has no holes."""
    if flat_view(like) is None:
        return part.view(like.shape)
    return part.as_strided(like.shape, like.stride(), part.storage_offset())
