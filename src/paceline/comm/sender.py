"""A thread that starts all-reduces in an order that the ranks have agreed on, a limited number at a time.

Gloo runs operations first in, first out: an operation that was started cannot be overtaken any more. So this thread
holds a slice back until it is next in order, its data is ready, and fewer than `window` all-reduces are in progress.
Every rank starts them in the same order. If a slice is ready later on one rank, the other ranks wait for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.group import Comm
from paceline.comm.groups.delegating import inner_groups
from paceline.comm.messages.packed_tensors import abort_connections

OPERATIONS_PER_GROUP = 2
"""Operations that one Gloo group runs at the same time; for a larger window, several groups are used in turn."""
CLOSE_TIMEOUT_S = 5.0
"""Longest time that `close` waits. An NCCL all-reduce that a peer never starts only ends with the group's time-out."""


@dataclass(eq=False)
class Slice:
    """A piece of memory that is all-reduced by itself."""

    flat: Tensor
    is_ready: bool = False
    ready_on_device: torch.cuda.Event | None = None
    work: dist.Work | None = None
    """Handle of its all-reduce, once that has started."""
    ready_s: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0
    """The three times are on the host's clock; the end is recorded only in timed rounds."""


class Sender:
    """`start_round`, `mark_ready` its slices in any order, `wait` for some; the next round starts after all arrived."""

    def __init__(self, comm: Comm, window: int) -> None:
        self._comm = comm
        all_ranks = range(comm.world_size)
        group_count = -(-window // OPERATIONS_PER_GROUP) if comm.backend == "gloo" else 1
        self._groups = [comm.subgroup(all_ranks) for _ in range(group_count)]
        self._started = 0
        self._window = window
        self._changed = threading.Condition()
        self._queue: deque[Slice] = deque()
        self._in_progress: deque[dist.Work] = deque()
        """The last all-reduces that were started, at most as many as the window."""
        self._step: int | None = None
        self._is_timed = False
        self._is_closed = False
        self._error: BaseException | None = None
        self.has_raised = False
        """Whether `wait` has raised an error."""
        self._thread = threading.Thread(target=self._run, name="paceline-sender", daemon=True)
        self._thread.start()

    def start_round(self, order: Iterable[Slice], *, timed: bool = False) -> None:
        """Start a round that sends these slices in the given order; `timed` also records when each ends."""
        with self._changed:
            self._step, self._is_timed = self._comm.step, timed
            for one in order:
                one.is_ready, one.work, one.end_s = False, None, 0.0
                self._queue.append(one)

    def mark_ready(self, slices: Iterable[Slice]) -> None:
        """Mark slices as ready: their memory holds the data to send."""
        now_s = time.perf_counter()
        with self._changed:
            for one in slices:
                if one.flat.is_cuda:
                    one.ready_on_device = torch.cuda.Event()
                    one.ready_on_device.record()
                one.is_ready, one.ready_s = True, now_s
            self._changed.notify_all()

    def wait(self, slices: Sequence[Slice]) -> None:
        """Wait until all these slices hold the sum; raise if one of them cannot be sent."""
        try:
            for one in slices:
                self._wait_for(one)
        except BaseException:
            self.has_raised = True
            raise

    def close(self) -> None:
        """Stop the thread; all-reduces in progress fail, on all ranks.

        After an error a rank may not have started those that others wait for. The groups are used here only, so their
        connections can be closed.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._comm.backend == "gloo" and (self._queue or not all(work.is_completed() for work in self._in_progress)):
            for group in self._groups:
                abort_connections((self._comm.rank + 1) % self._comm.world_size, inner_groups(group)[-1])
        self._thread.join(CLOSE_TIMEOUT_S)
        self._queue.clear()
        self._groups = []

    @property
    def _has_stopped(self) -> bool:
        return self._is_closed or self._error is not None

    def _wait_for(self, one: Slice) -> None:
        if one.work is None:
            with self._changed:
                self._changed.wait_for(lambda: one.work is not None or self._has_stopped)
        if one.work is None:
            raise self._error or RuntimeError("the sender was closed before all slices were sent")
        one.work.wait()

    def _run(self) -> None:
        in_progress = self._in_progress
        try:
            if self._comm.device.type == "cuda":
                torch.cuda.set_device(self._comm.device)
            while (one := self._next()) is not None:
                if len(in_progress) >= self._window:
                    in_progress[0].wait()
                    in_progress.popleft()
                in_progress.append(self._start(one))
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> Slice | None:
        """Wait until the next slice in order is ready, and return it; None once the sender is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (self._queue and self._queue[0].is_ready))
            return None if self._is_closed else self._queue.popleft()

    def _start(self, one: Slice) -> dist.Work:
        if one.ready_on_device is not None:
            one.ready_on_device.wait()
        one.start_s = time.perf_counter()
        group, self._started = self._groups[self._started % len(self._groups)], self._started + 1
        with self._comm.on_behalf_of(self._step):
            work: dist.Work | None = dist.all_reduce(one.flat, group=group, async_op=True)
        assert work is not None, "only ranks outside the group get no work handle"
        if self._is_timed:
            work.get_future().add_done_callback(lambda _: setattr(one, "end_s", time.perf_counter()))
        with self._changed:
            one.work = work
            self._changed.notify_all()
        return work
