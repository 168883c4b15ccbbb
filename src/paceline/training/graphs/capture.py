"""Capture of work on a GPU as a CUDA graph, which one call then starts as a whole.

A step of a small batch consists of hundreds of kernels that the GPU finishes faster than the host can start them. A
graph starts them all at once. It contains the kernels with the addresses of their tensors and the values of all
numbers; Python code does not run again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch

Replay = Callable[[], None]
"""Function that runs captured work again, in the current stream."""


class Capturer(Protocol):
    """Way of capturing work, so that it can be replayed."""

    def rehearse(self, work: Callable[[], None]) -> None:
        """Run `work` as a capture would start it; raise if it waits for the device, which a capture does not allow."""

    def capture(self, work: Callable[[], None]) -> Replay:
        """Capture the operations that `work` starts, without running them; raise if one cannot be captured."""


class CudaCapturer:
    """Captures CUDA graphs. All use one pool of memory, so that only one of them may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def rehearse(self, work: Callable[[], None]) -> None:
        """Run `work` in the stream of captures. It prepares libraries for this stream, and finds most that is illegal.

        What is found here does no harm. A capture that fails leaves the allocator and the random number generator of
        the GPU in a state that has to be repaired.
        """
        current, mode = torch.cuda.current_stream(self._device), torch.cuda.get_sync_debug_mode()
        self._stream.wait_stream(current)
        _set_sync_debug_mode("error")
        try:
            with torch.cuda.stream(self._stream):
                work()
        finally:
            _set_sync_debug_mode(mode)
            current.wait_stream(self._stream)

    def capture(self, work: Callable[[], None]) -> Replay:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        try:
            # Other threads may call CUDA meanwhile: those of NCCL, the sampler of resources, the writer of checkpoints.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                work()
        except BaseException:
            torch.cuda.set_stream(current)  # Ending a failed capture raises before torch returns to this stream.
            self._repair()
            raise
        return graph.replay

    def _repair(self) -> None:
        """Bring torch back to its normal state after a failed capture, as far as it does not do so itself."""
        native: Any = torch._C
        with suppress(RuntimeError, AttributeError):  # The capture has left the pool by itself.
            native._cuda_endAllocateToPool(self._device.index or 0, self._pool)
            native._cuda_releasePool(self._device.index or 0, self._pool)
        self._pool = torch.cuda.graph_pool_handle()
        again = torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local")
        with suppress(RuntimeError), again:
            torch.zeros(1, device=self._device)  # A capture that succeeds ends that of the random number generator.


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It is called a prototype.
        torch.cuda.set_sync_debug_mode(mode)


CAPTURERS: dict[str, Callable[[torch.device], Capturer]] = {"cuda": CudaCapturer}
"""Capturers by the type of the device. Devices without one train without graphs."""


@contextmanager
def capturing(what: str) -> Iterator[None]:
    """Turn an error inside the `with` block, which captures `what`, into a `CaptureError`."""
    try:
        yield
    except (CaptureError, torch.OutOfMemoryError):
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
