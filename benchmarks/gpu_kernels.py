"""Kernels of a step on a GPU: their times by the profiler, and what they compute, by their names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

STEPS = 5
"""Steps that are profiled."""
GROUPS = {
    "BatchNorm": r"batch_norm|batchnorm|bn_(fw|bw)|_norm_",
    "ReLU": r"relu|clamp_min|threshold",
    "convolution": r"conv|xmma|implicit|wgrad|dgrad|fprop|cutlass|nvjet|cudnn|sm\d+_",
    "matrix product": r"gemm|gemv|splitK",
    "optimiser": r"Sgd|Adam|multi_tensor|FusedOptimizer",
    "loss and accuracy": r"softmax|nll_loss|argmax|ArgMax|reduce_kernel",
    "pooling": r"pool",
    "addition": r"CUDAFunctor_add|add_kernel",
    "casts and copies": r"copy|Memcpy|Memset|cast|fill|Fill",
    "indexing and augmentation": r"index|gather|scatter|where|arange|bitwise|shift|flip|elementwise_kernel_with_index",
    "compiled": r"triton",
}
"""Patterns of names, by what a kernel computes; the first one that fits counts."""
OTHER = "other"


@dataclass(frozen=True)
class KernelTime:
    """Kernels of one name in a step."""

    name: str
    group: str
    ms: float
    """Time per step."""
    calls: float
    """Number per step."""


def group_of(name: str) -> str:
    """Return what a kernel computes, judged by its name."""
    if name.startswith("triton"):
        return "compiled"
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, name)), OTHER)


def kernel_times(train: Callable[[int], float]) -> list[KernelTime]:
    """Profile some steps; return the kernels, longest first."""
    train(STEPS)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        train(STEPS)
    found = [
        KernelTime(event.key, group_of(event.key), event.self_device_time_total / STEPS / 1e3, event.count / STEPS)
        for event in profiler.key_averages()
        if event.self_device_time_total
    ]
    return sorted(found, key=lambda kernel: -kernel.ms)


def show_kernels(kernels: Sequence[KernelTime], title: str, console: Console) -> None:
    """Print the time of each group, with its longest kernel."""
    groups: dict[str, list[KernelTime]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.group].append(kernel)
    total_ms = sum(kernel.ms for kernel in kernels)
    table = Table("group", title=f"{title}: {total_ms:.2f} ms", title_justify="left")
    for heading in ("ms", "share", "kernels"):
        table.add_column(heading, justify="right")
    table.add_column("longest", overflow="ellipsis", no_wrap=True, max_width=90)
    for group, own in sorted(groups.items(), key=lambda item: -sum(kernel.ms for kernel in item[1])):
        spent_ms, calls = sum(kernel.ms for kernel in own), sum(kernel.calls for kernel in own)
        table.add_row(group, f"{spent_ms:.2f}", f"{spent_ms / total_ms:.0%}", f"{calls:.0f}", own[0].name)
    console.print(table)
