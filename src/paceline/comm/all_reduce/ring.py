"""Ring all-reduce on messages between neighbours: reduce-scatter, then all-gather."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.comm.all_reduce.exchange import Scratch, run_schedule
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
    """Replace a one-dimensional contiguous tensor by its sum over the ranks, in place, bit-identical on all ranks.

    `ranks` are the participating ranks of `comm.group`, in ring order. Each of them must call this with a tensor of the
    same size; other ranks must not call it. Pass the same `scratch` to repeated calls to avoid allocating memory; each
    thread needs its own.
    """
    members = range(comm.world_size) if ranks is None else ranks
    messages = schedule(tensor.numel(), tensor.element_size(), members.index(comm.rank), len(members), segment_kb)
    run_schedule(messages, tensor, comm, members, scratch or Scratch())
