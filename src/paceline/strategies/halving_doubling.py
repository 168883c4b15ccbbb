"""`halving_doubling`: all gradients in one all-reduce by recursive halving and doubling, after backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from paceline.comm.all_reduce.halving_doubling import halving_doubling_all_reduce
from paceline.config.specs import check_positive
from paceline.strategies.base.packed import Packed


@dataclass(frozen=True, kw_only=True)
class HalvingDoublingOptions:
    """What halving and doubling let one choose."""

    segment_kb: float = 2048.0
    """KiB of a message: while one is added up, the next is on the wire. Smaller ones overlap more and cost more."""

    def __post_init__(self) -> None:
        check_positive("halving_doubling", self, "segment_kb")


class HalvingDoubling(Packed):
    """Partners exchange halves, then quarters, then eighths of the gradients, until each has the sum of one part.

    Idea
        A ring needs as many steps as there are ranks. Here the distance between partners halves in every step, and so
        does what they exchange: after lg p steps each rank has the whole sum of 1/p of the gradients. Going the same
        way back, it gets the other parts. As many bytes as a ring, in far fewer steps. Where p is no power of two, the
        ranks beyond the largest one give all they have to a partner first, and get the result from it in the end.

    Who sends what to whom (p = 4; the gradients are parts a b c d)
        halving    0 ──cd─▶ ◀─ab── 2     1 ──cd─▶ ◀─ab── 3     each adds what arrives to what it has kept
                   0 ──b──▶ ◀─a─── 1     2 ──d──▶ ◀─c─── 3     now each has the sum of one part
        doubling   0 ──a──▶ ◀─b─── 1     2 ──c──▶ ◀─d─── 3     the same way back
                   0 ──ab─▶ ◀─cd── 2     1 ──ab─▶ ◀─cd── 3     everyone has everything

    Cost
        p = 2ᵏ: 2 lg p·α + 2(p−1)/p·Mβ + (p−1)/p·Mγ. Otherwise, with q the largest power of two below p:
        2(lg q + 1)α + 2((q−1)/q + 1)Mβ + ((q−1)/q + 1)Mγ.

    When to use it
        With a power of two of ranks, and messages so small or ranks so many that latency counts.

    When not
        With 3, 5, 6, 7 … ranks and large gradients: those that are left over double the bytes of their partners. On a
        network whose switches do not carry all pairs at once: partners are far apart. `ring` has neither trouble.

    Source
        Rabenseifner, "Optimization of collective reduction operations", ICCS 2004; Thakur, Rabenseifner and Gropp,
        "Optimization of collective communication operations in MPICH", 2005.
    """

    name: ClassVar[str] = "halving_doubling"
    Options: ClassVar[type] = HalvingDoublingOptions

    def all_reduce(self, tensor: Tensor) -> None:
        halving_doubling_all_reduce(tensor, self.comm, segment_kb=self.options.segment_kb, scratch=self.scratch)
