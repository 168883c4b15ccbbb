"""`ring`: one ring all-reduce of all gradients after backward, written with messages between neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from paceline.comm.all_reduce import all_reduce
from paceline.config.specs import check_positive
from paceline.plans.ring import ALGORITHM
from paceline.strategies.base.packed import Packed


@dataclass(frozen=True, kw_only=True)
class RingOptions:
    """Size of messages."""

    segment_kb: float = 2048.0
    """Message size in KiB. One message is summed while the next is sent: small ones overlap more but add latency."""

    def __post_init__(self) -> None:
        check_positive("ring", self, "segment_kb")


class Ring(Packed):
    """Each rank exchanges messages only with its two neighbours in a ring: first partial sums, then results.

    Idea
        The packed gradients are cut into p chunks, one for each rank. In each step, a rank adds its own part to the
        chunk that it received and sends it to the next rank. After p−1 steps, each rank has the complete sum of one
        chunk. In p−1 more steps, the complete chunks are passed around the ring and copied. All links carry the same
        number of bytes at all times, and no all-reduce needs fewer bytes. Chunks are sent in segments, so that one
        segment is added while the next is being sent.

    Who sends what to whom (p = 3; a, b, c are chunks)
                    rank 0 ──▶ rank 1 ──▶ rank 2 ──▶ rank 0
        step 1         a          b          c              each rank adds what it receives
        step 2         c          a          b              rank 0 now has the sum of b, rank 1 of c, rank 2 of a
        step 3         b          c          a              each rank copies what it receives
        step 4         a          b          c              every rank has all sums

    Cost
        2(p−1)α + 2(p−1)/p·Mβ + (p−1)/p·Mγ for all gradients (M bytes) together.

    When to use it
        To read how a ring works and to study the segment size. On one host it takes 1.07 to 1.1 times as long as Gloo's
        all-reduce, which is the same algorithm (`benchmarks/all_reduces.py`). With small models on CPUs: one all-reduce
        of all gradients has less overhead than buckets (docs/results.md). With large models, `ddp` hides part of the
        communication, and `ring` does not.

    When not to use it
        With many ranks and few bytes: latency grows with p, but only with 2 lg p in `halving_doubling`. If
        communication should overlap with backward: use `ddp` or `bucketed`.

    Source
        Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of Parallel
        and Distributed Computing, 2009.
    """

    name: ClassVar[str] = "ring"
    Options: ClassVar[type] = RingOptions

    def all_reduce(self, tensor: Tensor) -> None:
        all_reduce(tensor, self.comm, ALGORITHM, segment_kb=self.options.segment_kb, scratch=self.scratch)
