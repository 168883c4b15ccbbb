"""The one choke point of the wire: a process group that delegates to Gloo or NCCL and notes every operation.

DDP's bucket all-reduces, which C++ starts, come through it as well as those of `torch.distributed`; strategies know
nothing of it. When an operation that somebody waits for in Python ends is seen at `wait()`; the end of one that runs on
its own (DDP's) is told by its future. Messages of Gloo have no future, so theirs is seen at `wait()` too.
"""

# mypy: disable-error-code="override, assignment"
# (torch declares overloads that neither its own Python code nor C++ calls.)

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
"""What torch calls groups of this kind."""


class TimedGroup(dist.ProcessGroup):
    """A process group that notes what another one does."""

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

    def _timed(
        self, kind: RowKind, size: int, peer: int, opts: Any, call: Callable[..., dist.Work | None], *arguments: Any
    ) -> dist.Work | None:
        operation = self.log.start(kind, size, self._member(peer), blocking=not opts.asyncOp)
        work = call(*arguments, opts)
        if operation is None:
            return work
        if opts.asyncOp and work is not None:
            return self._under_way(operation, work)
        if work is not None:  # NCCL gives none: the stream is waiting for it already.
            work.wait()  # As who asked for it would do now, and may do again. A handle to see that would cost more.
        self.log.end(operation)
        return work

    def _under_way(self, operation: ActiveOperation, work: dist.Work) -> dist.Work:
        future, log = work.get_future(), self.log
        log.look()
        log.look_after(operation, future.done)  # Gloo's work itself is not done before its callbacks are.
        by_engine = not _called_from_python()
        if not (by_engine and log.by_engine(operation)):
            # It must not hold the group: Gloo's thread may be the last to let go of it, and cannot end itself.
            future.add_done_callback(lambda _: log.end(operation))
        if by_engine:
            return work  # The engine waits for the future.
        log.left_open = True
        return TimedWork(work, operation, log)

    def _member(self, peer: int) -> int:
        """A peer's number in the run; one that there is not is left to the inner group to refuse."""
        return self._members[peer] if 0 <= peer < len(self._members) else peer

    def _message(
        self, kind: RowKind, peer: int, call: Callable[..., dist.Work], tensors: list[Tensor], *arguments: Any
    ) -> dist.Work:
        operation = self.log.start(kind, _bytes(tensors), self._member(peer))
        work = call(tensors, *arguments)
        return work if operation is None else TimedWork(work, operation, self.log)


class TimedWork(dist.Work):
    """The handle of an operation that is timed."""

    def __init__(self, inner: dist.Work, operation: ActiveOperation, log: OperationLog) -> None:
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
    members: Sequence[int]


def timed_group(
    ranks: Sequence[int],
    backend: str,
    timeout: timedelta,
    log: OperationLog,
    members: Sequence[int] | None = None,
    new_group: NewGroup = dist.new_group,
) -> dist.ProcessGroup:
    """A timed group over ranks of the world; called on every rank, as `torch.distributed.new_group`.

    `members` are their numbers in the run, where those are not 0, 1, 2 and so on.
    """
    inner = new_group(list(ranks), backend=backend, timeout=timeout)
    timing = _Timing(inner, log, range(len(ranks)) if members is None else members)
    group = new_group(list(ranks), backend=BACKEND, timeout=timeout, pg_options=timing)
    if isinstance(group, TimedGroup):
        # Whoever asks for the backend, torch itself too, shall go on as with the group inside.
        known = distributed_c10d._world.pg_map
        known[group] = (known[inner][0], known[group][1])
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


_PYTHON_API = vars(distributed_c10d)


def _called_from_python() -> bool:
    """Whether `torch.distributed` has called the group's method that called the two that called this, or C++ has."""
    try:
        return sys._getframe(4).f_globals is _PYTHON_API
    except ValueError:  # Nothing of Python is below.
        return False


def _create(_: Any, timing: _Timing) -> TimedGroup:
    return TimedGroup(timing.inner, timing.log, timing.members)


def _bytes(tensors: Sequence[Tensor]) -> int:
    size = 0
    for tensor in tensors:
        size += tensor.numel() * tensor.element_size()
    return size


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
