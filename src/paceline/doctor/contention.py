"""Measures what communication and computation do to each other: on CPUs both want the same cores."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.group import Comm
from paceline.doctor.link import finish
from paceline.records.examination import AllReducePoint, Contention

CONTENTION_S = 1.2
ROUNDS = 3
MOST_BYTES = 4 * 1024**2
SIDE = {"cpu": 384, "cuda": 4096}
"""Of the square matrices that are multiplied, with the threads that torch is set to: some milliseconds' work."""


def measure_contention(comm: Comm, points: Sequence[AllReducePoint], budget_s: float = CONTENTION_S) -> Contention:
    """Matrix products and all-reduces, each alone and then both at once, in turn. The same on every rank.

    `points` tell how long all-reduces take on this link; the largest that is not too long for the budget is taken.
    """
    part_s = budget_s / (3 * ROUNDS)
    suitable = [point for point in points if point.bytes <= MOST_BYTES and point.time_s <= part_s / 2]
    point = max(suitable, key=lambda point: point.bytes, default=points[0])
    repeats = math.ceil(part_s / point.time_s)
    buffer = torch.zeros(point.bytes // 4, device=comm.device)
    product = Product.on(comm)
    product.repeat(comm, 0)
    rounds = [_round(comm, product, buffer, repeats, part_s) for _ in range(ROUNDS)]
    columns = [statistics.median(column) for column in zip(*rounds, strict=True)]
    alone_s, messages_alone_s, beside_s, messages_beside_s = columns
    return Contention(
        flop=product.flop,
        matmul_alone_s=alone_s,
        matmul_contended_s=beside_s,
        bytes=point.bytes,
        all_reduce_alone_s=messages_alone_s,
        all_reduce_contended_s=messages_beside_s,
    )


@dataclass(frozen=True)
class Product:
    """A matrix product that can be repeated."""

    left: Tensor
    right: Tensor
    out: Tensor

    @classmethod
    def on(cls, comm: Comm) -> Product:
        """One of a size that suits the device."""
        side = SIDE[comm.device.type]
        return cls(*[torch.full((side, side), 1 / side, device=comm.device) for _ in range(3)])

    @property
    def flop(self) -> int:
        """Multiplications and additions."""
        return 2 * self.left.shape[0] ** 3

    def once(self, comm: Comm) -> None:
        """One product, to its end."""
        torch.mm(self.left, self.right, out=self.out)
        finish(comm)

    def repeat(self, comm: Comm, seconds: float) -> float:
        """Seconds per product, over this time and one product at least."""
        began, count = time.perf_counter(), 0
        while count == 0 or time.perf_counter() - began < seconds:
            self.once(comm)
            count += 1
        return (time.perf_counter() - began) / count


def _round(comm: Comm, product: Product, buffer: Tensor, repeats: int, part_s: float) -> list[float]:
    """Seconds per product alone, per all-reduce alone, per product and per all-reduce together; the slowest rank's."""
    comm.smallest(0)
    alone_s = product.repeat(comm, part_s)
    comm.smallest(0)
    messages_alone_s = _all_reduces(comm, buffer, repeats)
    comm.smallest(0)
    together = _together(comm, product, buffer, repeats)
    times = torch.tensor([alone_s, messages_alone_s, *together], dtype=torch.float64)
    slowest: list[float] = torch.stack(comm.gather(times)).amax(dim=0).tolist()
    return slowest


def _together(comm: Comm, product: Product, buffer: Tensor, repeats: int) -> tuple[float, float]:
    """Computes for as long as all-reduces go on in another thread: their number is fixed, as ranks have to agree."""
    with ThreadPoolExecutor(1) as thread:
        began, count = time.perf_counter(), 0
        messages = thread.submit(_all_reduces, comm, buffer, repeats)
        while count == 0 or not messages.done():
            product.once(comm)
            count += 1
        beside_s = (time.perf_counter() - began) / count
        return beside_s, messages.result()


def _all_reduces(comm: Comm, buffer: Tensor, repeats: int) -> float:
    """Seconds per all-reduce, one after the other."""
    with _own_stream(comm):
        began = time.perf_counter()
        for _ in range(repeats):
            dist.all_reduce(buffer, group=comm.group)
            finish(comm)
        return (time.perf_counter() - began) / repeats


def _own_stream(comm: Comm) -> AbstractContextManager[Any]:
    """On a GPU, work in another thread waits for the main one unless it has a stream of its own."""
    if comm.device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(comm.device))
