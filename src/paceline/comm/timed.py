"""The one choke point of the wire: a process group that delegates to Gloo or NCCL and notes every operation.

DDP's bucket all-reduces, which C++ starts, come through it as well as those of `torch.distributed`; strategies know
nothing of it. When an operation that somebody waits for in Python ends is seen at `wait()`; the end of one that runs on
its own (DDP's) is told by its future. Messages of Gloo have no future, so theirs is seen at `wait()` too.
"""

# mypy: disable-error-code="override, assignment"
# (torch declares overloads that neither its own Python code nor C++ calls.)

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.futures import Future

from paceline.measure.operations import Operation, OperationLog
from paceline.records.timeline import NO_PEER, Kind, Purpose

BACKEND = "paceline"
"""What torch calls groups of this kind."""


class TimedGroup(dist.ProcessGroup):
    """A process group that notes what another one does."""

    def __init__(self, inner: dist.ProcessGroup, log: OperationLog) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner = inner
        self.log = log
        self._name = self._description = ""

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or AllreduceOptions()
        operation = self.log.start(Kind.ALL_REDUCE, _bytes(tensors), NO_PEER)
        return self._under_way(operation, self.inner.allreduce(tensors, opts), opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or AllreduceCoalescedOptions()
        operation = self.log.start(Kind.ALL_REDUCE, _bytes(tensors), NO_PEER)
        return self._under_way(operation, self.inner.allreduce_coalesced(tensors, opts), opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or BroadcastOptions()
        operation = self.log.start(Kind.BROADCAST, _bytes(tensors), opts.rootRank)
        return self._under_way(operation, self.inner.broadcast(tensors, opts), opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or ReduceOptions()
        operation = self.log.start(Kind.REDUCE, _bytes(tensors), opts.rootRank)
        return self._under_way(operation, self.inner.reduce(tensors, opts), opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or GatherOptions()
        operation = self.log.start(Kind.GATHER, _bytes(inputs) * self.size(), opts.rootRank)
        return self._under_way(operation, self.inner.gather(outputs, inputs, opts), opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        opts = opts or ScatterOptions()
        operation = self.log.start(Kind.SCATTER, _bytes(outputs) * self.size(), opts.rootRank)
        return self._under_way(operation, self.inner.scatter(outputs, inputs, opts), opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or AllgatherOptions()
        operation = self.log.start(Kind.ALL_GATHER, _bytes(inputs) * self.size(), NO_PEER)
        return self._under_way(operation, self.inner.allgather(outputs, inputs, opts), opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or AllgatherOptions()
        operation = self.log.start(Kind.ALL_GATHER, _bytes(inputs) * self.size(), NO_PEER)
        return self._under_way(operation, self.inner.allgather_coalesced(outputs, inputs, opts), opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts or AllgatherOptions()
        operation = self.log.start(Kind.ALL_GATHER, _bytes(outputs), NO_PEER)
        return self._under_way(operation, self.inner.allgather_into_tensor_coalesced(outputs, inputs, opts), opts)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        opts = opts or AllgatherOptions()
        operation = self.log.start(Kind.ALL_GATHER, _bytes([output]), NO_PEER)
        return self._under_way(operation, self.inner._allgather_base(output, tensor, opts), opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        opts = opts or ReduceScatterOptions()
        operation = self.log.start(Kind.REDUCE_SCATTER, _bytes(outputs) * self.size(), NO_PEER)
        return self._under_way(operation, self.inner.reduce_scatter(outputs, inputs, opts), opts)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        opts = opts or ReduceScatterOptions()
        operation = self.log.start(Kind.REDUCE_SCATTER, _bytes([tensor]), NO_PEER)
        return self._under_way(operation, self.inner._reduce_scatter_base(output, tensor, opts), opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts or ReduceScatterOptions()
        operation = self.log.start(Kind.REDUCE_SCATTER, _bytes(inputs), NO_PEER)
        return self._under_way(operation, self.inner.reduce_scatter_tensor_coalesced(outputs, inputs, opts), opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or AllToAllOptions()
        operation = self.log.start(Kind.ALL_TO_ALL, _bytes(inputs), NO_PEER)
        return self._under_way(operation, self.inner.alltoall(outputs, inputs, opts), opts)

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        opts = opts or AllToAllOptions()
        operation = self.log.start(Kind.ALL_TO_ALL, _bytes([tensor]), NO_PEER)
        work = self.inner.alltoall_base(output, tensor, output_splits, input_splits, opts)
        return self._under_way(operation, work, opts)

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        operation = self.log.start(Kind.SEND, _bytes(tensors), dst)
        return self._message(operation, self.inner.send(tensors, dst, tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        operation = self.log.start(Kind.RECV, _bytes(tensors), src)
        return self._message(operation, self.inner.recv(tensors, src, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        operation = self.log.start(Kind.RECV, _bytes(tensors), NO_PEER)
        return self._message(operation, self.inner.recv_anysource(tensors, tag))

    def barrier(self, opts: Any = None) -> dist.Work:
        opts = opts or BarrierOptions()
        operation = self.log.start(Kind.BARRIER, 0, NO_PEER)
        return self._under_way(operation, self.inner.barrier(opts), opts)

    # Their names since torch 2.13.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    @property
    def _device_types(self) -> list[torch.device]:
        return self.inner._device_types

    def _get_backend(self, device: torch.device) -> Any:
        return self.inner._get_backend(device)

    # What torch asks of every group. It keeps names itself only for groups with backends that C++ knows.

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def shutdown(self) -> None:
        """The inner group is ended by whoever made it."""

    def abort(self) -> None:
        """The inner group is ended by whoever made it."""

    def _under_way(self, operation: Operation | None, work: dist.Work, opts: Any) -> dist.Work:
        if operation is None:
            return work
        if opts.asyncOp:
            work.get_future().add_done_callback(lambda _: self.log.end(operation))
        return TimedWork(work, operation, self.log)

    def _message(self, operation: Operation | None, work: dist.Work) -> dist.Work:
        return work if operation is None else TimedWork(work, operation, self.log)


class TimedWork(dist.Work):
    """The handle of an operation that is timed."""

    def __init__(self, inner: dist.Work, operation: Operation, log: OperationLog) -> None:
        super().__init__()
        self._inner = inner
        self._operation = operation
        self._log = log

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._log.waiting(self._operation)
        done = self._inner.wait() if timeout is None else self._inner.wait(timeout)
        self._log.end(self._operation)
        return bool(done)

    def get_future(self) -> Future[Any]:
        return self._inner.get_future()

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def is_success(self) -> bool:
        return self._inner.is_success()

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> list[Tensor]:
        return self._inner.result()

    def _source_rank(self) -> int:
        return self._inner._source_rank()

    source_rank = _source_rank

    def synchronize(self) -> None:
        self._inner.synchronize()


@dataclass(frozen=True)
class _Timing:
    """What a timed group is made of, in the place of a backend's own options."""

    inner: dist.ProcessGroup
    log: OperationLog


def timed_group(ranks: Sequence[int], backend: str, timeout: timedelta, log: OperationLog) -> dist.ProcessGroup:
    """A timed group over ranks of the world; called on every rank, as `torch.distributed.new_group`."""
    inner = dist.new_group(list(ranks), backend=backend, timeout=timeout)
    timing = _Timing(inner, log)
    group: dist.ProcessGroup = dist.new_group(list(ranks), backend=BACKEND, timeout=timeout, pg_options=timing)
    return group


def end_group(group: dist.ProcessGroup) -> None:
    """Ends a group, and the one inside."""
    inner = group.inner if isinstance(group, TimedGroup) else None
    dist.destroy_process_group(group)
    if inner is not None:
        dist.destroy_process_group(inner)


def carrying(group: dist.ProcessGroup, purpose: Purpose) -> AbstractContextManager[None]:
    """Says, for the length of a `with`, what a group carries other than gradients."""
    return group.log.carrying(purpose) if isinstance(group, TimedGroup) else nullcontext()


def _create(_: Any, timing: _Timing) -> TimedGroup:
    return TimedGroup(timing.inner, timing.log)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
