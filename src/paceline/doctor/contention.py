"""Measure how much communication and computation slow each other down: on CPUs they compete for the same cores."""

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
from paceline.doctor.link import wait_for_gpu
from paceline.records.examination import AllReducePoint, Contention

CONTENTION_S = 1.2
ROUNDS = 3
MAX_BYTES = 4 * 1024**2
MATRIX_SIZE = {"cpu": 384, "cuda": 4096}
"""Rows and columns of the square matrices that are multiplied: a product takes some milliseconds."""


def measure_contention(comm: Comm, points: Sequence[AllReducePoint], budget_s: float = CONTENTION_S) -> Contention:
    """Time matrix products and all-reduces, each alone and then both at once; return the same result on every rank.

    `points` are the all-reduce times measured on this link. The largest message that fits into the budget is used.
    """
    part_s = budget_s / (3 * ROUNDS)
    suitable = [point for point in points if point.bytes <= MAX_BYTES and point.time_s <= part_s / 2]
    point = max(suitable, key=lambda point: point.bytes, default=points[0])
    repeats = math.ceil(part_s / point.time_s)
    buffer = torch.zeros(point.bytes // 4, device=comm.device)
    product = Product.on(comm)
    product.time_products(comm, 0)
    rounds = [_round(comm, product, buffer, repeats, part_s) for _ in range(ROUNDS)]
    columns = [statistics.median(column) for column in zip(*rounds, strict=True)]
    matmul_alone_s, all_reduce_alone_s, matmul_contended_s, all_reduce_contended_s = columns
    return Contention(
        flop=product.flop,
        matmul_alone_s=matmul_alone_s,
        matmul_contended_s=matmul_contended_s,
        bytes=point.bytes,
        all_reduce_alone_s=all_reduce_alone_s,
        all_reduce_contended_s=all_reduce_contended_s,
    )


@dataclass(frozen=True)
class Product:
    """Matrix product that is repeated for a given time."""

    left: Tensor
    right: Tensor
    out: Tensor

    @classmethod
    def on(cls, comm: Comm) -> Product:
        """Return a product whose size suits the device of `comm`."""
        side = MATRIX_SIZE[comm.device.type]
        return cls(*[torch.full((side, side), 1 / side, device=comm.device) for _ in range(3)])

    @property
    def flop(self) -> int:
        """Floating-point operations of one product."""
        return 2 * self.left.shape[0] ** 3

    def multiply(self, comm: Comm) -> None:
        """Compute one product and wait for its end."""
        torch.mm(self.left, self.right, out=self.out)
        wait_for_gpu(comm)

    def time_products(self, comm: Comm, seconds: float) -> float:
        """Return the seconds per product, over the given time and at least one product."""
        began, count = time.perf_counter(), 0
        while count == 0 or time.perf_counter() - began < seconds:
            self.multiply(comm)
            count += 1
        return (time.perf_counter() - began) / count


def _round(comm: Comm, product: Product, buffer: Tensor, repeats: int, part_s: float) -> list[float]:
    """Return the slowest rank's seconds per operation.

    In this order: product alone, all-reduce alone, product beside all-reduces, all-reduce beside products.
    """
    comm.control.barrier()
    matmul_alone_s = product.time_products(comm, part_s)
    comm.control.barrier()
    all_reduce_alone_s = _time_all_reduces(comm, buffer, repeats)
    comm.control.barrier()
    together = _together(comm, product, buffer, repeats)
    times = torch.tensor([matmul_alone_s, all_reduce_alone_s, *together], dtype=torch.float64)
    slowest: list[float] = torch.stack(comm.control.gather(times)).amax(dim=0).tolist()
    return slowest


def _together(comm: Comm, product: Product, buffer: Tensor, repeats: int) -> tuple[float, float]:
    """Compute products while another thread runs all-reduces; return seconds per product and per all-reduce.

    The number of all-reduces is fixed, because every rank must run the same number.
    """
    with ThreadPoolExecutor(1) as thread:
        began, count = time.perf_counter(), 0
        all_reduces = thread.submit(_time_all_reduces, comm, buffer, repeats)
        while count == 0 or not all_reduces.done():
            product.multiply(comm)
            count += 1
        matmul_contended_s = (time.perf_counter() - began) / count
        return matmul_contended_s, all_reduces.result()


def _time_all_reduces(comm: Comm, buffer: Tensor, repeats: int) -> float:
    """Run all-reduces one after the other; return the seconds per all-reduce."""
    with _own_stream(comm):
        began = time.perf_counter()
        for _ in range(repeats):
            dist.all_reduce(buffer, group=comm.group)
            wait_for_gpu(comm)
        return (time.perf_counter() - began) / repeats


def _own_stream(comm: Comm) -> AbstractContextManager[Any]:
    """Select a separate CUDA stream: on the default stream the thread would wait for the main thread's work."""
    if comm.device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(comm.device))
