"""`bucketed`: our own overlapped reducer, which does in Python what DistributedDataParallel does in C++."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.distributed as dist
from torch import nn

from paceline.config.specs import check_positive
from paceline.plans.buckets import MIB
from paceline.strategies.base.overlapped import Bucket, Overlapped


@dataclass(frozen=True, kw_only=True)
class BucketedOptions:
    """How large the buckets are."""

    bucket_mb: float = 25.0
    """Bucket size in MiB: a bucket is closed once it holds as much."""
    first_mb: float = 1.0
    """The same of the first bucket: a small one sets out early."""

    def __post_init__(self) -> None:
        check_positive("bucketed", self, "bucket_mb", "first_mb")


class Bucketed(Overlapped):
    """Gradients are packed into buckets, each all-reduced as soon as backward has filled it: `ddp`, to be read.

    Idea
        A hook on each parameter runs when backward has its gradient. It copies the gradient into a bucket, divided by
        the number of ranks; the hook that fills a bucket starts its all-reduce and returns at once, so the wire works
        while backward computes the layers before. `step` waits for the buckets, points each gradient into its bucket
        and lets the optimiser read it there. Ranks must start their buckets in the same order, so a full bucket waits
        for those before it. The order that counts is the one in which backward really fills them, which the first step
        shows: after it the buckets are packed anew.

    Who sends what to whom (time runs to the right)
        backward   [layer 4][layer 3][layer 2][layer 1]
        hooks              ▼        ▼        ▼        ▼
        buckets    [  0: layer 4   ][ 1: layers 3, 2, 1 ]
        the wire           [bucket 0 ring]            [bucket 1 ring]
        optimiser                                                    [step]

    Cost
        Per bucket of m bytes 2(p−1)α + 2(p−1)/p·mβ + (p−1)/p·mγ; only what ends after backward is exposed. The hooks
        cost some microseconds for each parameter.

    When to use it
        To see how `ddp` works, and as the base for a scheme of your own: `strategies/base/overlapped.py` has the hooks,
        `strategies/base/buckets.py` the memory, this file what becomes of a full bucket.

    When not
        For models of very many small parameters: `ddp` runs its hooks in C++. For loops that change gradients between
        backward and `step`, which refuses it: they have been sent by then. Optimisers that keep gradients beyond their
        step have to copy what they keep, since the next step fills the same memory.

    Source
        Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
    """

    name: ClassVar[str] = "bucketed"
    Options: ClassVar[type] = BucketedOptions

    def wrap(self, model: nn.Module) -> nn.Module:
        self.bucket_bytes = int(self.options.bucket_mb * MIB)
        self.first_bucket_bytes = int(self.options.first_mb * MIB)
        self._works: dict[int, dist.Work] = {}
        return super().wrap(model)

    def launch(self, bucket: Bucket) -> None:
        work = dist.all_reduce(bucket.flat, group=self.comm.group, async_op=True)
        assert work is not None, "only a rank outside the group gets no handle"
        self._works[bucket.number] = work

    def arrive(self, bucket: Bucket) -> None:
        self._works.pop(bucket.number).wait()
