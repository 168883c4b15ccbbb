"""Timed process group: delegates to Gloo or NCCL and records every operation.

All traffic of a strategy passes through it, including DDP's bucket all-reduces, which C++ starts; strategies need no
code for it. The end of an operation is recorded in `wait()`, if Python code waits for it. The end of an operation that
only C++ waits for (DDP's) is reported by its future. Gloo's point-to-point messages have no future, so their end, too,
is recorded in `wait()`.
"""

# mypy: disable-error-code="override, assignment"
# (torch declares overloads that are called neither from its Python code nor from C++.)

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
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

from paceline.comm.local_group import NewGroup
from paceline.measure.operations import ActiveOperation, OperationLog
from paceline.records.timeline import NO_PEER, Purpose, RowKind

BACKEND = "paceline"
"""Name of this backend in torch."""


class TimedGroup(dist.ProcessGroup):
    """A process group that runs its operations on an inner group and records them."""

    def __init__(self, inner: dist.ProcessGroup, log: OperationLog, members: Sequence[int]) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner = inner
        self.log = log
        self._members = members
        self._name = self._description = ""

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work | None:
        opts = opts or AllreduceOptions()
        return self._timed(RowKind.ALL_REDUCE, _bytes(tensors), NO_PEER, opts, self.inner.allreduce, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work | None:
        opts = opts or AllreduceCoalescedOptions()
        return self._timed(RowKind.ALL_REDUCE, _bytes(tensors), NO_PEER, opts, self.inner.allreduce_coalesced, tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work | None:
        opts = opts or BroadcastOptions()
        return self._timed(RowKind.BROADCAST, _bytes(tensors), opts.rootRank, opts, self.inner.broadcast, tensors)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work | None:
        opts = opts or ReduceOptions()
        return self._timed(RowKind.REDUCE, _bytes(tensors), opts.rootRank, opts, self.inner.reduce, tensors)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work | None:
        opts = opts or GatherOptions()
        size = _bytes(inputs) * len(self._members)
        return self._timed(RowKind.GATHER, size, opts.rootRank, opts, self.inner.gather, outputs, inputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work | None:
        opts = opts or ScatterOptions()
        size = _bytes(outputs) * len(self._members)
        return self._timed(RowKind.SCATTER, size, opts.rootRank, opts, self.inner.scatter, outputs, inputs)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work | None:
        opts = opts or AllgatherOptions()
        size = _bytes(inputs) * len(self._members)
        return self._timed(RowKind.ALL_GATHER, size, NO_PEER, opts, self.inner.allgather, outputs, inputs)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work | None:
        opts = opts or AllgatherOptions()
        size = _bytes(inputs) * len(self._members)
        return self._timed(RowKind.ALL_GATHER, size, NO_PEER, opts, self.inner.allgather_coalesced, outputs, inputs)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work | None:
        opts = opts or AllgatherOptions()
        return self._timed(
            RowKind.ALL_GATHER, _bytes([output]), NO_PEER, opts, self.inner._allgather_base, output, tensor
        )

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work | None:
        opts, call = opts or AllgatherOptions(), self.inner.allgather_into_tensor_coalesced
        return self._timed(RowKind.ALL_GATHER, _bytes(outputs), NO_PEER, opts, call, outputs, inputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work | None:
        opts = opts or ReduceScatterOptions()
        size = _bytes(outputs) * len(self._members)
        return self._timed(RowKind.REDUCE_SCATTER, size, NO_PEER, opts, self.inner.reduce_scatter, outputs, inputs)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work | None:
        opts, call = opts or ReduceScatterOptions(), self.inner._reduce_scatter_base
        return self._timed(RowKind.REDUCE_SCATTER, _bytes([tensor]), NO_PEER, opts, call, output, tensor)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work | None:
        opts, call = opts or ReduceScatterOptions(), self.inner.reduce_scatter_tensor_coalesced
        return self._timed(RowKind.REDUCE_SCATTER, _bytes(inputs), NO_PEER, opts, call, outputs, inputs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work | None:
        opts = opts or AllToAllOptions()
        return self._timed(RowKind.ALL_TO_ALL, _bytes(inputs), NO_PEER, opts, self.inner.alltoall, outputs, inputs)

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work | None:
        opts, splits = opts or AllToAllOptions(), (output_splits, input_splits)
        size = _bytes([tensor])
        return self._timed(RowKind.ALL_TO_ALL, size, NO_PEER, opts, self.inner.alltoall_base, output, tensor, *splits)

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work | None:
        return self._message(RowKind.SEND, dst, self.inner.send, tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work | None:
        return self._message(RowKind.RECV, src, self.inner.recv, tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work | None:
        return self._message(RowKind.RECV, NO_PEER, self.inner.recv_anysource, tensors, tag)

    def barrier(self, opts: Any = None) -> dist.Work | None:
        return self._timed(RowKind.BARRIER, 0, NO_PEER, opts or BarrierOptions(), self.inner.barrier)

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        operation = self.log.start(RowKind.BARRIER, 0, NO_PEER, blocking=True)
        self.inner.monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]
        if operation is not None:
            self.log.end(operation)

    # Names of the methods above since torch 2.13.
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

    # Methods that torch calls on every group. It stores names itself only for groups with C++ backends.

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
        """Do nothing: `destroy_group` destroys the inner group."""

    def abort(self) -> None:
        """Do nothing: `destroy_group` destroys the inner group."""

    def _timed(
        self, kind: RowKind, size: int, peer: int, opts: Any, call: Callable[..., dist.Work | None], *arguments: Any
    ) -> dist.Work | None:
        operation = self.log.start(kind, size, self._member(peer), blocking=not opts.asyncOp)
        work = call(*arguments, opts)
        if operation is None:
            return work
        if opts.asyncOp and work is not None:
            return self._track(operation, work)
        if work is not None:  # NCCL returns none: the stream already waits for the operation.
            work.wait()  # The caller would wait now, and may wait again. A `TimedWork` would cost more time.
        self.log.end(operation)
        return work

    def _track(self, operation: ActiveOperation, work: dist.Work) -> dist.Work:
        """Record the end of an asynchronous operation; return the handle for the caller."""
        future, log = work.get_future(), self.log
        log.poll()
        log.poll_later(operation, future.done)  # Gloo's work itself is not done before its callbacks have run.
        by_engine = not _called_from_python()
        if not (by_engine and log.mark_engine_start(operation)):
            # The callback must not hold the group: if Gloo's thread released it last, that thread would join itself.
            future.add_done_callback(lambda _: log.end(operation))
        if by_engine:
            return work  # The autograd engine waits for the future.
        log.has_async_operations = True
        return TimedWork(work, operation, log)

    def _member(self, peer: int) -> int:
        """Return a peer's rank in the run. An invalid peer is returned unchanged: the inner group raises the error."""
        return self._members[peer] if 0 <= peer < len(self._members) else peer

    def _message(
        self, kind: RowKind, peer: int, call: Callable[..., dist.Work], tensors: list[Tensor], *arguments: Any
    ) -> dist.Work:
        operation = self.log.start(kind, _bytes(tensors), self._member(peer))
        work = call(tensors, *arguments)
        return work if operation is None else TimedWork(work, operation, self.log)


class TimedWork(dist.Work):
    """Work handle of a timed operation."""

    def __init__(self, inner: dist.Work, operation: ActiveOperation, log: OperationLog) -> None:
        super().__init__()
        self._inner = inner
        self._operation = operation
        self._log = log

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._log.mark_waiting(self._operation)
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
    """Arguments of a `TimedGroup`, passed through torch as the backend's options."""

    inner: dist.ProcessGroup
    log: OperationLog
    members: Sequence[int]


def timed_group(
    ranks: Sequence[int],
    backend: str,
    timeout: timedelta,
    log: OperationLog,
    members: Sequence[int] | None = None,
    new_group: NewGroup = dist.new_group,
) -> dist.ProcessGroup:
    """Create a timed group of ranks of the world; every rank calls this, as with `torch.distributed.new_group`.

    `members` are the numbers of these ranks in the run, if they are not 0, 1, 2 and so on.
    """
    inner = new_group(list(ranks), backend=backend, timeout=timeout)
    timing = _Timing(inner, log, range(len(ranks)) if members is None else members)
    group = new_group(list(ranks), backend=BACKEND, timeout=timeout, pg_options=timing)
    if isinstance(group, TimedGroup):
        # `get_backend` must return the backend of the inner group: torch itself depends on it.
        groups = distributed_c10d._world.pg_map
        groups[group] = (groups[inner][0], groups[group][1])
    return group


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy a group and, if it is timed, its inner group."""
    inner = group.inner if isinstance(group, TimedGroup) else None
    dist.destroy_process_group(group)
    if inner is not None:
        dist.destroy_process_group(inner)


def carrying(group: dist.ProcessGroup, purpose: Purpose) -> AbstractContextManager[None]:
    """Record what operations on a group carry inside the `with` block, if not gradients."""
    return group.log.carrying(purpose) if isinstance(group, TimedGroup) else nullcontext()


_PYTHON_API = vars(distributed_c10d)


def _called_from_python() -> bool:
    """Return whether `torch.distributed` called the group's method, and not C++.

    Frame 1 is `_track`, frame 2 `_timed`, frame 3 the group's method and frame 4 its caller.
    """
    try:
        return sys._getframe(4).f_globals is _PYTHON_API
    except ValueError:  # No Python frame called the method.
        return False


def _create(_: Any, timing: _Timing) -> TimedGroup:
    return TimedGroup(timing.inner, timing.log, timing.members)


def _bytes(tensors: Sequence[Tensor]) -> int:
    size = 0
    for tensor in tensors:
        size += tensor.numel() * tensor.element_size()
    return size


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
