"""Small messages between the workers of a run: losses, counts, and agreement between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.messages.packed_tensors import receive_without_timeout
from paceline.measure.operations import OperationLog
from paceline.records.timeline import NO_PEER, Purpose, RowKind

WorkT = TypeVar("WorkT")


class ControlChannel:
    """Channel for the training loop's own messages: small CPU tensors, apart from the strategy's traffic.

    With an operation log, messages sent during a step are recorded: ranks wait for each other in them, too.
    """

    def __init__(self, group: dist.ProcessGroup, log: OperationLog | None = None) -> None:
        self.group = group
        """Gloo group of the workers."""
        self._log = log

    def sum(self, values: Tensor) -> Tensor:
        """Sum a small CPU tensor over the ranks, in place, and return it."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def smallest(self, value: int) -> int:
        """Return the smallest of the ranks' values."""
        return int(self._all_reduce(torch.tensor(value), dist.ReduceOp.MIN))

    def largest(self, value: float) -> float:
        """Return the largest of the ranks' values."""
        return float(self._all_reduce(torch.tensor(value, dtype=torch.float64), dist.ReduceOp.MAX))

    def largest_of(self, values: Tensor) -> Tensor:
        """Take the largest value over the ranks of each element of a small CPU tensor, in place, and return it."""
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def any_of(self, flags: Tensor) -> Tensor:
        """Combine small CPU tensors of 0 and 1: an element is 1 if it is 1 on any rank."""
        return self._all_reduce(flags, dist.ReduceOp.MAX)

    def gather(self, values: Tensor) -> list[Tensor]:
        """Return every rank's small CPU tensor, on every rank."""
        gathered = [torch.empty_like(values) for _ in range(self.group.size())]
        with self._recorded(RowKind.ALL_GATHER, values.nbytes * len(gathered)):
            dist.all_gather(gathered, values, group=self.group)
        return gathered

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self._all_reduce(torch.zeros(1, dtype=torch.uint8), dist.ReduceOp.MAX)

    def while_others_wait(self, work: Callable[[], WorkT]) -> WorkT | None:
        """Do work on rank 0 that may take longer than the time-out of the group; return its result there, else None.

        Every rank calls this, and the others wait as long as it takes. They go on however the work ends, and if rank 0
        dies they get an error, because its connection is closed.
        """
        done = torch.zeros(1, dtype=torch.uint8)
        if self.group.rank():
            receive_without_timeout(done, 0, self.group)
            return None
        try:
            return work()
        finally:
            for rank in range(1, self.group.size()):
                dist.send(done, group_dst=rank, group=self.group)

    def _all_reduce(self, values: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        with self._recorded(RowKind.ALL_REDUCE, values.nbytes):
            dist.all_reduce(values, how, group=self.group)
        return values

    @contextmanager
    def _recorded(self, kind: RowKind, size: int) -> Iterator[None]:
        """Record an operation that runs during a step."""
        log = self._log
        if log is None:
            yield
            return
        with log.carrying(Purpose.CONTROL):
            operation = log.start(kind, size, NO_PEER, blocking=True)
        try:
            yield
        except BaseException:
            log.drop(operation)
            raise
        log.end(operation)
