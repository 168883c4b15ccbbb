"""Ring all-reduce on messages between neighbours: reduce-scatter, then all-gather."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.comm.all_reduce.exchange import Scratch, scheduled_all_reduce
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
    """Sum a tensor over the ranks, which are in ring order; the arguments are those of `scheduled_all_reduce`."""
    scheduled_all_reduce(schedule, tensor, comm, ranks, segment_kb=segment_kb, scratch=scratch)
