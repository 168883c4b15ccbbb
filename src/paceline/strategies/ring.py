"""`ring`: all gradients in one all-reduce around a ring, written on messages between neighbours, after backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from paceline.comm.all_reduce.ring import ring_all_reduce
from paceline.config.specs import check_positive
from paceline.strategies.base.packed import Packed


@dataclass(frozen=True, kw_only=True)
class RingOptions:
    """What the ring lets one choose."""

    segment_kb: float = 2048.0
    """KiB of a message: while one is added up, the next is on the wire. Smaller ones overlap more and cost more."""

    def __post_init__(self) -> None:
        check_positive("ring", self, "segment_kb")


class Ring(Packed):
    """Every rank talks to two neighbours alone: sums go once around the ring, then results do.

    Idea
        The packed gradients are cut into p chunks, one for each rank. A chunk sets out, and whoever gets it adds its
        own and passes it on; after p−1 steps one rank has all of its sum. In p−1 more steps finished chunks go round
        and are copied. All links carry the same at all times, and no all-reduce can do with fewer bytes. Chunks travel
        in segments, so that one is added up while the next is on the wire.

    Who sends what to whom (p = 3; a, b, c are chunks, each starts with its own rank's part)
                    rank 0 ──▶ rank 1 ──▶ rank 2 ──▶ rank 0
        step 1         a          b          c              each adds what arrives
        step 2         c          a          b              now rank 0 has b, rank 1 c, rank 2 a in full
        step 3         b          c          a              each copies what arrives
        step 4         a          b          c              everyone has everything

    Cost
        2(p−1)α + 2(p−1)/p·Mβ + (p−1)/p·Mγ, for all gradients (M bytes) at once.

    When to use it
        To read how a ring works and to see what cutting does: on one host it takes 1.07 to 1.1 times as long as Gloo's
        own (`benchmarks/all_reduces.py`), which is the same algorithm. With large models, where bytes count and not
        latency.

    When not
        With many ranks and few bytes: latency grows with p, where `halving_doubling` has 2 lg p. And nothing overlaps
        with backward: `ddp` and `bucketed` do that.

    Source
        Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of Parallel
        and Distributed Computing, 2009.
    """

    name: ClassVar[str] = "ring"
    Options: ClassVar[type] = RingOptions

    def all_reduce(self, tensor: Tensor) -> None:
        ring_all_reduce(tensor, self.comm, segment_kb=self.options.segment_kb, scratch=self.scratch)
