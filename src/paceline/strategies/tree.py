"""`tree`: one all-reduce of all gradients along a binomial tree, after backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from paceline.comm.all_reduce import all_reduce
from paceline.config.specs import check_positive
from paceline.plans.tree import ALGORITHM
from paceline.strategies.base.packed import Packed


@dataclass(frozen=True, kw_only=True)
class TreeOptions:
    """Size of messages."""

    segment_kb: float = 2048.0
    """Message size in KiB. Segments follow each other along the tree: small ones overlap more but add latency."""

    def __post_init__(self) -> None:
        check_positive("tree", self, "segment_kb")


class Tree(Packed):
    """Ranks add up gradients along a tree that ends at rank 0, and receive the result along the same tree.

    Idea
        The ranks form a binomial tree: rank r has the parent that remains when the lowest one-bit of r is cleared. Each
        rank waits for its children, adds their gradients to its own and sends the sum to its parent. Rank 0 then has
        the sum over all ranks and sends it back down the tree. The longest path has ⌈lg p⌉ messages in each direction,
        for any number of ranks. The gradients are cut into segments that follow each other: while rank 0 adds the
        second segment, the first is already on its way back.

    Who sends what to whom (p = 5; M are all gradients)
        reduce      1 ──M─▶ 0     3 ──M─▶ 2                 each rank adds what it receives
                    2 ──M─▶ 0
                    4 ──M─▶ 0                               rank 0 has the sum
        broadcast   0 ──M─▶ 4                               the same messages in reverse
                    0 ──M─▶ 2
                    0 ──M─▶ 1     2 ──M─▶ 3                 every rank has the sum

    Cost
        2⌈lg p⌉(α + Mβ) + ⌈lg p⌉·Mγ in one segment. Rank 0 receives and sends ⌈lg p⌉·M bytes, whatever the segments;
        with many segments, receiving and sending overlap, and the cost approaches ⌈lg p⌉·M(β + γ).

    When to use it
        With small gradients on many ranks whose number is not a power of two: it has the fewest messages in a row, and
        each rank has at most ⌈lg p⌉ + 1 partners. To see what rank 0 costs: compare it with `gather_scatter`, where
        rank 0 exchanges p−1 messages instead of ⌈lg p⌉, and with `ring`, where no rank is special.

    When not to use it
        With large gradients: rank 0 sends ⌈lg p⌉·M bytes, a ring less than 2M in total per rank. If p is a power of
        two, `halving_doubling` has as few steps and sends far fewer bytes.

    Source
        Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005 (binomial
        trees for reduce and broadcast).
    """

    name: ClassVar[str] = "tree"
    Options: ClassVar[type] = TreeOptions

    def all_reduce(self, tensor: Tensor) -> None:
        all_reduce(tensor, self.comm, ALGORITHM, segment_kb=self.options.segment_kb, scratch=self.scratch)
