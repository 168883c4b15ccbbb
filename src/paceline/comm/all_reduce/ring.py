"""All-reduce around a ring, on messages between neighbours: first sums go round, then results."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.comm.all_reduce.exchange import Scratch, carry_out
from paceline.comm.group import Comm
from paceline.plans.cuts import SEGMENT_KB
from paceline.plans.ring import schedule

__all__ = ["Scratch", "ring_all_reduce"]


def ring_all_reduce(
    tensor: Tensor,
    comm: Comm,
    ranks: Sequence[int] | None = None,
    *,
    segment_kb: float = SEGMENT_KB,
    scratch: Scratch | None = None,
) -> None:
    """Replaces a one-dimensional contiguous tensor by its sum over the ranks, in place, bit-identical on all of them.

    `ranks` are the members of `comm.group` that take part, in the order of the ring; all of them call it with tensors
    of one size, the others do not. Whoever calls it often brings `scratch` along, one for each thread.
    """
    members = range(comm.world_size) if ranks is None else ranks
    messages = schedule(tensor.numel(), tensor.element_size(), members.index(comm.rank), len(members), segment_kb)
    carry_out(messages, tensor, comm, members, scratch or Scratch())
