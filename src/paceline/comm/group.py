"""The process groups of one run: one for its strategy's traffic, one for the loop's own bookkeeping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.timed import carrying, end_group, timed_group
from paceline.measure.steps import Stopwatch
from paceline.records.timeline import Purpose


@dataclass(frozen=True)
class Comm:
    """What a strategy knows of the other ranks: those that take part in the run, counted from 0."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup
    """The strategy's. With a stopwatch every operation on it is timed."""
    control: dist.ProcessGroup
    """The loop's, for losses, counts and agreement between steps. It speaks Gloo, on CPU tensors."""
    backend: str = "gloo"
    """Who moves the bytes of `group`: gloo or nccl."""
    stopwatch: Stopwatch | None = None
    """What times this rank's steps; None where nobody measures."""

    def agreed(self) -> None:
        """A strategy says so when its gradients are agreed on and the optimiser starts."""
        if self.stopwatch is not None:
            self.stopwatch.agreed()

    def carrying(self, purpose: Purpose) -> AbstractContextManager[None]:
        """Says, for the length of a `with`, what is sent other than gradients."""
        return carrying(self.group, purpose)

    def sum(self, values: Tensor) -> Tensor:
        """Adds a small CPU tensor over the ranks, outside any timed step."""
        dist.all_reduce(values, group=self.control)
        return values

    def smallest(self, value: int) -> int:
        """The least of the ranks' values."""
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self.control)
        return int(tensor)

    def largest(self, value: float) -> float:
        """The greatest of the ranks' values."""
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.control)
        return float(tensor)

    def gather(self, values: Tensor) -> list[Tensor]:
        """Every rank's small CPU tensor, on every rank."""
        everyone = [torch.empty_like(values) for _ in range(self.world_size)]
        dist.all_gather(everyone, values, group=self.control)
        return everyone


def open_comm(
    ranks: Sequence[int],
    *,
    device: torch.device,
    backend: str,
    timeout_s: float,
    stopwatch: Stopwatch | None = None,
) -> Comm | None:
    """Makes the groups of a run among `ranks` of the world; called on every rank, None on those not among them.

    With a stopwatch that has a log of operations, what the strategy sends is noted there.
    """
    timeout = timedelta(seconds=timeout_s)
    if stopwatch is not None and stopwatch.operations is not None:
        group = timed_group(ranks, backend, timeout, stopwatch.operations)
    else:
        group = dist.new_group(list(ranks), backend=backend, timeout=timeout)
    control = dist.new_group(list(ranks), backend="gloo", timeout=timeout)
    if dist.get_rank() not in ranks:
        return None
    return Comm(
        rank=list(ranks).index(dist.get_rank()),
        world_size=len(ranks),
        device=device,
        group=group,
        control=control,
        backend=backend,
        stopwatch=stopwatch,
    )


def close_comm(comm: Comm) -> None:
    """Ends the run's groups and their threads."""
    end_group(comm.group)
    dist.destroy_process_group(comm.control)


def broadcast_from_rank_0(tensors: Sequence[Tensor], comm: Comm) -> None:
    """Overwrites each tensor with rank 0's, one message per dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    for members in by_dtype.values():
        sizes = [member.numel() for member in members]
        if comm.rank == 0:
            flat = torch.cat([member.reshape(-1) for member in members])
        else:
            flat = members[0].new_empty(sum(sizes))
        dist.broadcast(flat.view(torch.uint8), group_src=0, group=comm.group)  # Gloo does not know every type.
        if comm.rank != 0:
            parts = flat.split(sizes)
            torch._foreach_copy_(members, [part.view_as(member) for part, member in zip(parts, members, strict=True)])


@contextmanager
def from_rank_0(tensors: Sequence[Tensor], comm: Comm) -> Iterator[None]:
    """Lends every rank rank 0's values for the length of a `with`, then gives each its own back."""
    own = [tensor.detach().clone() for tensor in tensors]
    with comm.carrying(Purpose.WEIGHTS):
        broadcast_from_rank_0(tensors, comm)
    try:
        yield
    finally:
        if own:
            torch._foreach_copy_([tensor.detach() for tensor in tensors], own)
