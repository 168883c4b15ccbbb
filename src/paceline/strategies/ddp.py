"""`ddp`: PyTorch's own DistributedDataParallel, with its options, and without its overlap for comparison."""

# No `from __future__ import annotations` here: DDP reads the hook's annotations and wants them to be types.
import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.config.specs import check_positive
from paceline.plans.classic import DEFAULT_BUCKET_MB
from paceline.strategies.base.strategy import Strategy

# The loop owns BatchNorm, so DDP shall not broadcast buffers. The switch has another name since torch 2.13.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_NO_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


@dataclass(frozen=True, kw_only=True)
class DdpOptions:
    """What DistributedDataParallel lets one choose."""

    bucket_mb: float = 25.0
    """Bucket size in MiB, PyTorch's bucket_cap_mb; at its default of 25 the first bucket is 1 MiB."""
    overlap: bool = True
    """Start a bucket's all-reduce while backward still runs; false holds all of them back until its end."""
    bucket_view: bool = False
    """Let gradients be views into the buckets: saves one copy of them. PyTorch's gradient_as_bucket_view."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same way, which lets DDP plan once."""

    def __post_init__(self) -> None:
        check_positive("ddp", self, "bucket_mb")


class Ddp(Strategy):
    """Gradients are packed into buckets, each all-reduced as soon as backward has filled it.

    Idea
        Backward computes gradients from the last layer to the first. Those of the last layers can travel while the
        first layers still compute. Buckets make few large messages of many small ones; overlap hides them.

    Who sends what to whom (time runs to the right)
        backward   [layer 4][layer 3][layer 2][layer 1]
        the wire            [ bucket 0 ring  ][ bucket 1 ring ]
        optimiser                                              [step]

    Cost
        Per bucket of m bytes 2(p−1)α + 2(p−1)/p·mβ + (p−1)/p·mγ. Bucket i starts when it is full and the one before is
        done; only what ends after backward is exposed.

    When to use it
        By default.

    When not
        When backward is short compared with the traffic: then little can hide, and sending less, or through shared
        memory, is what helps. On CPUs the traffic takes cores away from backward.

    Source
        Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
    """

    name: ClassVar[str] = "ddp"
    travel = "overlapped"
    Options: ClassVar[type] = DdpOptions

    _module: DistributedDataParallel | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        options: DdpOptions = self.options
        self._module = DistributedDataParallel(
            model,
            process_group=self.comm.group,
            init_sync=False,  # attach() has just given every rank the same weights.
            # Said aloud, PyTorch's own default would make the first bucket as large as the others.
            bucket_cap_mb=None if options.bucket_mb == DEFAULT_BUCKET_MB else options.bucket_mb,
            find_unused_parameters=self.allow_unused,
            gradient_as_bucket_view=options.bucket_view,
            static_graph=options.static_graph,
            **_NO_BUFFERS,
        )
        if not options.overlap:
            self._module.register_comm_hook(_Held(self.comm.group), _hold_until_last)
        return self._module

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        assert self._module is not None
        return nullcontext() if last else self._module.no_sync()

    def step(self, max_norm: float | None = None) -> None:
        self.update(max_norm)

    def close(self) -> None:
        self._module = None
        super().close()


@dataclass
class _Held:
    """Buckets that wait for the end of backward."""

    group: dist.ProcessGroup
    buckets: list[tuple[Tensor, Future[Tensor]]] = field(default_factory=list)


def _hold_until_last(held: _Held, bucket: GradBucket) -> Future[Tensor]:
    """A DDP communication hook that sends the same buckets in the same order, but none before backward is done.

    DDP launches buckets in order, so the last one's hook runs when every gradient is ready.
    """
    buffer = bucket.buffer()
    future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
    held.buckets.append((buffer, future))
    if bucket.is_last():
        ready, held.buckets = held.buckets, []
        for waiting, _ in ready:
            dist.all_reduce(waiting, group=held.group)
        torch._foreach_div_([waiting for waiting, _ in ready], held.group.size())
        for waiting, done in ready:
            done.set_result(waiting)
    return future
