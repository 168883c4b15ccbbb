"""Capture of work on a GPU as a CUDA graph, which one call then starts as a whole.

A step of a small batch consists of hundreds of kernels that the GPU finishes faster than the host can start them. A
graph starts them all at once. It contains the kernels with the addresses of their tensors and the values of all
numbers; Python code does not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

Replay = Callable[[], None]
"""Function that runs captured work again, in the current stream."""


class Capturer(Protocol):
    """Way of capturing work, so that it can be replayed."""

    def capture(self, work: Callable[[], None]) -> Replay:
        """Capture the operations that `work` starts, without running them; raise if one cannot be captured."""


class CudaCapturer:
    """Captures CUDA graphs. All use one pool of memory, so that only one of them may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile: those of NCCL, the sampler of resources, the writer of checkpoints.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


CAPTURERS: dict[str, Callable[[torch.device], Capturer]] = {"cuda": CudaCapturer}
"""Capturers by the type of the device. Devices without one train without graphs."""


@contextmanager
def capturing(what: str) -> Iterator[None]:
    """Turn an error inside the `with` block, which captures `what`, into a `CaptureError`."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"{what} cannot be captured: {_first_cause(error)}") from error


class CaptureError(Exception):
    """Work that cannot be captured, with the reason in words."""


def _first_cause(error: BaseException) -> str:
    """Return the message of the error that came first: ending a failed capture raises another one."""
    while error.__context__ is not None:
        error = error.__context__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
