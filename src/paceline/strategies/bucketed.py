"""`bucketed`: the algorithm of DistributedDataParallel, which is in C++, written in Python."""

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
    """Bucket sizes."""

    bucket_mb: float = 25.0
    """Bucket size in MiB: a bucket is closed once it holds at least this much."""
    first_mb: float = 1.0
    """Size of the first bucket in MiB: a small one is sent early."""

    def __post_init__(self) -> None:
        check_positive("bucketed", self, "bucket_mb", "first_mb")


class Bucketed(Overlapped):
    """Gradients are copied into buckets, each all-reduced once backward has filled it: `ddp` in readable Python.

    Idea
        A hook on each parameter runs when backward has computed its gradient. The hook copies the gradient, divided by
        the number of ranks, into a bucket. The hook that fills a bucket starts its all-reduce and returns at once, so
        the bucket is sent while backward computes the next gradients. At the end of backward, a callback waits for the
        buckets and makes each gradient a view of its bucket, so the optimiser reads it without a copy. All ranks must
        start their buckets in the same order, so a full bucket waits for the buckets before it. The first step records
        the order in which backward fills the gradients; after it, the buckets are rebuilt in that order.

    Who sends what to whom (time runs to the right)
        backward   [layer 4][layer 3][layer 2][layer 1]
        hooks              ▼        ▼        ▼        ▼
        buckets    [  0: layer 4   ][ 1: layers 3, 2, 1 ]
        network            [bucket 0 ring]            [bucket 1 ring]
        optimiser                                                    [step]

    Cost
        2(p−1)α + 2(p−1)/p·mβ + (p−1)/p·mγ per bucket of m bytes. Only communication that ends after backward is
        exposed. The hooks take a few microseconds per parameter.

    When to use it
        To see how `ddp` works, and as the base for your own strategy: `strategies/base/overlapped.py` has the hooks,
        `strategies/base/buckets.py` the memory, and this file the all-reduce of a full bucket.

    When not to use it
        For models with very many small parameters: `ddp` runs its hooks in C++. Code that keeps a gradient after `step`
        must copy it, because the next step overwrites the memory.

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

    def wait(self, bucket: Bucket) -> None:
        self._works.pop(bucket.number).wait()
