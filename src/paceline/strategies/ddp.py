"""`ddp`: PyTorch's DistributedDataParallel with its options, and optionally without overlap, for comparison."""

# No `from __future__ import annotations` here: DDP checks that the hook's annotations are types, not strings.
import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.config.specs import check_positive
from paceline.errors import WorkloadError
from paceline.plans.classic import DEFAULT_BUCKET_MB
from paceline.strategies.base.scaling import scaler_argument
from paceline.strategies.base.strategy import Strategy

# The training loop handles BatchNorm, so DDP must not broadcast buffers. torch 2.13 renamed this argument.
_HAS_FORWARD_SYNC_BUFFERS = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_NO_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _HAS_FORWARD_SYNC_BUFFERS else "broadcast_buffers": False}


@dataclass(frozen=True, kw_only=True)
class DdpOptions:
    """Options of DistributedDataParallel."""

    bucket_mb: float = 25.0
    """Bucket size in MiB (PyTorch's bucket_cap_mb). With the default of 25, the first bucket is 1 MiB."""
    overlap: bool = True
    """Start each bucket's all-reduce during backward. With false, all buckets are sent at the end of backward."""
    bucket_view: bool = False
    """Make gradients views of the buckets, which saves one copy (PyTorch's gradient_as_bucket_view)."""
    static_graph: bool = False
    """Promise DDP that every step uses the same parameters in the same way, so that it plans only once."""

    def __post_init__(self) -> None:
        check_positive("ddp", self, "bucket_mb")


class Ddp(Strategy):
    """Gradients are copied into buckets; each bucket is all-reduced as soon as backward has filled it.

    Idea
        Backward computes gradients from the last layer to the first. Gradients of the last layers are sent while those
        of the first layers are still computed. Buckets combine many small messages into a few large ones; overlap hides
        their time behind backward.

    Who sends what to whom (time runs to the right)
        backward   [layer 4][layer 3][layer 2][layer 1]
        network             [ bucket 0 ring  ][ bucket 1 ring ]
        optimiser                                              [step]

    Cost
        2(p−1)α + 2(p−1)/p·mβ + (p−1)/p·mγ per bucket of m bytes. A bucket starts when it is full and the one before it
        is done. Only communication that ends after backward is exposed.

    When to use it
        By default.

    When not to use it
        If backward is short compared with the communication, little of it is hidden: sending fewer bytes, or using
        shared memory, helps more. On CPUs, communication uses cores that backward needs.

    Source
        Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
    """

    name: ClassVar[str] = "ddp"
    sends = "overlapped"
    agrees_in_backward = True
    Options: ClassVar[type] = DdpOptions

    _module: "_Module | None" = None

    def wrap(self, model: nn.Module) -> nn.Module:
        options: DdpOptions = self.options
        self._module = _Module(
            model,
            process_group=self.comm.group,
            init_sync=False,  # attach() has already copied rank 0's weights to every rank.
            # Passing the default explicitly would make the first bucket as large as the others.
            bucket_cap_mb=None if options.bucket_mb == DEFAULT_BUCKET_MB else options.bucket_mb,
            find_unused_parameters=self.allow_unused,
            gradient_as_bucket_view=options.bucket_view,
            static_graph=options.static_graph,
            **_NO_BUFFERS,
        )
        self._is_averaged: bool | None = None
        """Whether DDP averaged the last gradient of the first parameter; None if there was none since the last step."""
        _, first = self.parameters[0]
        self._hook = first.register_post_accumulate_grad_hook(self._on_gradient)
        if not options.overlap:
            self._module.register_comm_hook(_HeldBuckets(self.comm.group), _hold_until_last)
        return self._module

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._checked_module.no_sync()

    def _on_gradient(self, _: Tensor) -> None:
        """Note whether DDP averages this gradient: it does so for one backward pass per forward pass."""
        module = self._checked_module
        self._is_averaged, module.is_prepared = module.is_prepared, False

    def step(self, max_norm: float | None = None, scaler: GradScaler | None = None) -> None:
        if not self.options.static_graph:
            # DDP itself raises only in the next forward pass, after a step with gradients of this rank alone.
            self._check_all_used()
        if self.comm.world_size > 1:
            self._average_rest()
        self._is_averaged = None
        self.update(max_norm, **scaler_argument(scaler))

    def close(self) -> None:
        if self._module is not None:
            self._hook.remove()
        self._module = None
        super().close()

    def _average_rest(self) -> None:
        """Average gradients that DDP did not, or to which a backward pass has added since.

        This happens if all passes of a step are inside `accumulate`, if one forward pass has two backward passes, or if
        gradients are set by hand. The mean of a sum whose first part is a mean already is the mean of both parts.
        """
        if self._is_averaged or (self.allow_unused and self._is_averaged is None):
            return
        if self.allow_unused:  # Other ranks may have no gradient to notice it by.
            raise WorkloadError(
                "ddp did not average the gradients of the last backward pass.",
                hint="run forward and backward of the last micro-batch outside sync.accumulate(), backward once",
            )
        gradients = self.gradients()
        torch._foreach_div_(gradients, self.comm.world_size)
        for gradient in gradients:
            dist.all_reduce(gradient, group=self.comm.group)

    @property
    def _checked_module(self) -> "_Module":
        self._checked_attachment  # noqa: B018  (raises after close)
        assert self._module is not None
        return self._module


class _Module(DistributedDataParallel):
    """DistributedDataParallel that notes which backward passes it averages, and says what to copy instead of it."""

    is_prepared = False
    """Whether the next backward pass is averaged: since the last one there was a forward pass outside `no_sync`."""

    def forward(self, *inputs: Any, **arguments: Any) -> Any:
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.is_prepared = True
        return super().forward(*inputs, **arguments)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise WorkloadError(
            "sync.model cannot be copied or saved under ddp: it belongs to a process group.",
            hint="copy or save the model that was passed to attach()",
        )


_Module.__name__ = DistributedDataParallel.__name__  # Shown where the user's code reads an attribute of its own model.


@dataclass
class _HeldBuckets:
    """Buckets that are held back until the end of backward."""

    group: dist.ProcessGroup
    buckets: list[tuple[Tensor, Future[Tensor]]] = field(default_factory=list)


def _hold_until_last(held: _HeldBuckets, bucket: GradBucket) -> Future[Tensor]:
    """DDP communication hook that sends the same buckets in the same order, but only at the end of backward.

    DDP calls the hook for each bucket in order, so the call for the last bucket runs when every gradient is ready.
    """
    buffer = bucket.buffer()
    future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
    held.buckets.append((buffer, future))
    if bucket.is_last():
        ready, held.buckets = held.buckets, []
        # Divided first, as DDP does, since a sum may overflow in float16.
        torch._foreach_div_([waiting for waiting, _ in ready], held.group.size())
        for waiting, _ in ready:
            dist.all_reduce(waiting, group=held.group)
        for waiting, done in ready:
            done.set_result(waiting)
    return future
