"""`halving_doubling`: one all-reduce of all gradients by recursive halving and doubling, after backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from paceline.comm.all_reduce.exchange import scheduled_all_reduce
from paceline.config.specs import check_positive
from paceline.plans.halving_doubling import schedule
from paceline.strategies.base.packed import Packed


@dataclass(frozen=True, kw_only=True)
class HalvingDoublingOptions:
    """Size of messages."""

    segment_kb: float = 2048.0
    """Message size in KiB. One message is summed while the next is sent: small ones overlap more but add latency."""

    def __post_init__(self) -> None:
        check_positive("halving_doubling", self, "segment_kb")


class HalvingDoubling(Packed):
    """Pairs of ranks exchange halves, then quarters, then eighths of the gradients, until each has the sum of one part.

    Idea
        The number of steps of a ring grows with the number of ranks. Here, the distance between partners halves in
        every step, and so does the size of the messages. After lg p steps, each rank has the complete sum of 1/p of the
        gradients. The same steps in reverse distribute the sums to all ranks. This sends as many bytes as a ring, in
        far fewer steps. If p is not a power of two, the ranks beyond the largest power of two send their gradients to a
        partner first, and receive the result from it at the end.

    Who sends what to whom (p = 4; the gradients are parts a b c d)
        halving    0 ──cd─▶ ◀─ab── 2     1 ──cd─▶ ◀─ab── 3     each rank adds what it receives
                   0 ──b──▶ ◀─a─── 1     2 ──d──▶ ◀─c─── 3     each rank now has the sum of one part
        doubling   0 ──a──▶ ◀─b─── 1     2 ──c──▶ ◀─d─── 3     the same steps in reverse
                   0 ──ab─▶ ◀─cd── 2     1 ──ab─▶ ◀─cd── 3     every rank has all sums

    Cost
        If p = 2ᵏ: 2 lg p·α + 2(p−1)/p·Mβ + (p−1)/p·Mγ. Otherwise, with q the largest power of two below p:
        2(lg q + 1)α + 2((q−1)/q + 1)Mβ + ((q−1)/q + 1)Mγ.

    When to use it
        If the number of ranks is a power of two, and latency matters because gradients are small or ranks are many.

    When not to use it
        With 3, 5, 6, 7 … ranks and large gradients: the extra ranks double the bytes of their partners. On a network
        whose switches cannot carry all pairs at full rate at once: partners are far apart. `ring` has neither problem.

    Source
        Rabenseifner, "Optimization of collective reduction operations", ICCS 2004; Thakur, Rabenseifner and Gropp,
        "Optimization of collective communication operations in MPICH", 2005.
    """

    name: ClassVar[str] = "halving_doubling"
    Options: ClassVar[type] = HalvingDoublingOptions

    def all_reduce(self, tensor: Tensor) -> None:
        scheduled_all_reduce(schedule, tensor, self.comm, segment_kb=self.options.segment_kb, scratch=self.scratch)
