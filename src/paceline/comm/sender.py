"""A thread that starts all-reduces in an order that the ranks have agreed on, few at a time.

Gloo takes up what it is asked for first in, first out: what was handed over cannot be overtaken any more. So a slice is
held back here until it is its turn, its memory is full, and fewer than `window` are under way. Every rank starts them
in the same order; one that has a slice later than the others makes them wait, and nothing else.
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

AT_ONCE = 2
"""A group of Gloo carries out so many operations at the same time; for more, there are more groups, used in turn."""
LEAVE_AFTER_S = 5.0
"""An operation that peers never come to ends by the group's time-out; `close` does not wait as long."""


@dataclass(eq=False)
class Slice:
    """A piece of memory that is added up over the ranks by itself."""

    flat: Tensor
    is_full: bool = False
    full_on_device: torch.cuda.Event | None = None
    work: dist.Work | None = None
    """Once it is under way."""
    full_s: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0
    """The three by the host's clock; the end is noted in rounds that are timed."""


class Sender:
    """`open` a round, `fill` its slices in any order, `wait` for some; the next round opens when all have arrived."""

    def __init__(self, comm: Comm, window: int) -> None:
        self._comm = comm
        everyone, count = range(comm.world_size), -(-window // AT_ONCE) if comm.backend == "gloo" else 1
        self._groups = [comm.subgroup(everyone) for _ in range(count)]
        self._turn = 0
        self._window = window
        self._changed = threading.Condition()
        self._queue: deque[Slice] = deque()
        self._step: int | None = None
        self._is_timed = False
        self._is_closed = False
        self._error: BaseException | None = None
        self.has_raised = False
        """Whether somebody who waited was told of an error."""
        self._thread = threading.Thread(target=self._run, name="paceline-sender", daemon=True)
        self._thread.start()

    def open(self, order: Iterable[Slice], *, timed: bool = False) -> None:
        """A round begins, in which these are sent one after the other; timed if somebody wants to know their ends."""
        with self._changed:
            self._step, self._is_timed = self._comm.step, timed
            for one in order:
                one.is_full, one.work, one.end_s = False, None, 0.0
                self._queue.append(one)

    def fill(self, slices: Iterable[Slice]) -> None:
        """Says that what is to be sent is in the memory of some slices."""
        now_s = time.perf_counter()
        with self._changed:
            for one in slices:
                if one.flat.is_cuda:
                    one.full_on_device = torch.cuda.Event()
                    one.full_on_device.record()
                one.is_full, one.full_s = True, now_s
            self._changed.notify_all()

    def wait(self, slices: Sequence[Slice]) -> None:
        """Returns when all of them hold the sum; raises where one never will."""
        try:
            for one in slices:
                self._wait_for(one)
        except BaseException:
            self.has_raised = True
            raise

    def close(self) -> None:
        """Ends the thread. What is under way is waited for, but not for long."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(LEAVE_AFTER_S)
        self._queue.clear()
        self._groups = []

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._error is not None

    def _wait_for(self, one: Slice) -> None:
        if one.work is None:
            with self._changed:
                self._changed.wait_for(lambda: one.work is not None or self._is_over)
        if one.work is None:
            raise self._error or RuntimeError("the sender was closed with slices still to be sent")
        one.work.wait()

    def _run(self) -> None:
        under_way: deque[dist.Work] = deque()
        try:
            if self._comm.device.type == "cuda":
                torch.cuda.set_device(self._comm.device)
            while (one := self._next()) is not None:
                if len(under_way) >= self._window:
                    under_way.popleft().wait()
                under_way.append(self._start(one))
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> Slice | None:
        """The slice whose turn it is, once it is full; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (self._queue and self._queue[0].is_full))
            return None if self._is_closed else self._queue.popleft()

    def _start(self, one: Slice) -> dist.Work:
        if one.full_on_device is not None:
            one.full_on_device.wait()
        one.start_s = time.perf_counter()
        group, self._turn = self._groups[self._turn % len(self._groups)], self._turn + 1
        with self._comm.on_behalf_of(self._step):
            work: dist.Work | None = dist.all_reduce(one.flat, group=group, async_op=True)
        assert work is not None, "only a rank outside the group gets no handle"
        if self._is_timed:
            work.get_future().add_done_callback(lambda _: setattr(one, "end_s", time.perf_counter()))
        with self._changed:
            one.work = work
            self._changed.notify_all()
        return work
