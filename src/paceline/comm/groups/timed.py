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
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.futures import Future

from paceline.comm.groups.delegating import DelegatingGroup, bytes_of, wrapped_group
from paceline.comm.groups.local import NewGroup
from paceline.measure.operations import ActiveOperation, OperationLog
from paceline.records.timeline import Purpose, RowKind


class TimedGroup(DelegatingGroup):
    """A process group that runs its operations on an inner group and records them."""

    def __init__(self, inner: dist.ProcessGroup, log: OperationLog, members: Sequence[int]) -> None:
        super().__init__(inner, members)
        self.log = log

    def _run(
        self, kind: RowKind, size: int, peer: int, opts: Any, call: Callable[..., dist.Work | None], *arguments: Any
    ) -> dist.Work | None:
        log = self.log
        operation = log.start(kind, size, self._member(peer), blocking=not opts.asyncOp, members=self._members)
        try:
            work = call(*arguments, opts)
            if opts.asyncOp and work is not None:
                return self._track(operation, work)
            if work is not None:  # NCCL returns none: the stream already waits for the operation.
                work.wait()  # The caller would wait now, and may wait again. A `TimedWork` would cost more time.
        except BaseException:
            log.drop(operation)
            raise
        log.end(operation)
        return work

    def _track(self, operation: ActiveOperation, work: dist.Work) -> dist.Work:
        """Record the end of an asynchronous operation; return the handle for the caller."""
        log = self.log
        if not operation.is_kept:
            log.poll_later(operation, work.is_completed)
            return TimedWork(work, operation, log) if _called_from_python() else work
        future = work.get_future()
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

    def _message(
        self, kind: RowKind, peer: int, call: Callable[..., dist.Work], tensors: list[Tensor], *arguments: Any
    ) -> dist.Work:
        operation = self.log.start(kind, bytes_of(tensors), self._member(peer))
        try:
            work = call(tensors, *arguments)
        except BaseException:
            self.log.drop(operation)
            raise
        return TimedWork(work, operation, self.log)


class TimedWork(dist.Work):
    """Work handle of a timed operation."""

    def __init__(self, inner: dist.Work, operation: ActiveOperation, log: OperationLog) -> None:
        super().__init__()
        self._inner = inner
        self._operation = operation
        self._log = log

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._log.mark_waiting(self._operation)
        try:
            done = self._inner.wait() if timeout is None else self._inner.wait(timeout)
        except BaseException:
            self._log.drop(self._operation)
            raise
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


def timed_group(
    ranks: Sequence[int],
    inner: dist.ProcessGroup,
    timeout: timedelta,
    log: OperationLog,
    members: Sequence[int] | None = None,
    new_group: NewGroup = dist.new_group,
) -> dist.ProcessGroup:
    """Create a timed group around the group of some ranks of the world; every rank calls this, as with `new_group`.

    `members` are the numbers of these ranks in the run, if they are not 0, 1, 2 and so on.
    """
    in_run = range(len(ranks)) if members is None else members
    return wrapped_group(ranks, inner, timeout, lambda: TimedGroup(inner, log, in_run), new_group)


def carrying(group: dist.ProcessGroup, purpose: Purpose) -> AbstractContextManager[None]:
    """Record what operations on a group carry inside the `with` block, if not gradients."""
    return group.log.carrying(purpose) if isinstance(group, TimedGroup) else nullcontext()


_PYTHON_API = vars(distributed_c10d)


def _called_from_python() -> bool:
    """Return whether `torch.distributed` called the group's method, and not C++.

    Frame 1 is `_track`, frame 2 `_run`, frame 3 the group's method and frame 4 its caller.
    """
    try:
        return sys._getframe(4).f_globals is _PYTHON_API
    except ValueError:  # No Python frame called the method.
        return False


def untimed_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the process group inside a timed one, or the group itself."""
    return group.inner if isinstance(group, TimedGroup) else group
