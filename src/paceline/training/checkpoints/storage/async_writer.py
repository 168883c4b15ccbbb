"""Write checkpoints while training continues: copy the tensors into buffers, and let a thread write those.

The buffers are kept from one checkpoint to the next, since fresh memory costs more than the copy itself. Two sets are
not needed: a checkpoint that begins while the one before is still being written waits for it.
"""

from __future__ import annotations

import os
import threading
import traceback
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.records.checkpoint import CheckpointInfo
from paceline.strategies.base.strategy import State
from paceline.training.checkpoints.storage.contents import EncodedCheckpoint, ParamGroups, TensorsByFile
from paceline.training.checkpoints.storage.folder import CheckpointFolder

WRITER_NICENESS = 10
"""Priority of the writing thread. The lowest, 19, could keep it from running while it holds the GIL."""


class AsyncWriter:
    """Writer of a folder of checkpoints that returns as soon as the state is copied. Call `close` at the end."""

    def __init__(self, folder: CheckpointFolder) -> None:
        self.folder = folder
        self._buffers: TensorsByFile = {}
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._error: CheckpointError | None = None
        """Error of a finished write that has not been reported."""
        self._last_failed = False

    def write(self, state: State, param_groups: ParamGroups, info: CheckpointInfo, *, is_best: bool = False) -> None:
        """Copy a state and begin to write it; wait for the one before, if it is still being written.

        Raise a CheckpointError if the state cannot be kept or copied; `failed` and `wait` report an error of writing.
        """
        encoded = EncodedCheckpoint.of(state, param_groups, info)
        self._join()
        self._buffers = _copied(encoded.tensors, self._buffers)
        self._thread = threading.Thread(
            target=self._write,
            args=(replace(encoded, tensors=self._buffers), is_best),
            name="checkpoint writer",
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until everything is on the disk; raise the error of the last write unless `failed` has returned it."""
        self._join()
        if self._last_failed:
            error = self.failed()
            if error is not None:
                raise error

    def failed(self) -> CheckpointError | None:
        """Return the error of a write that has finished since the last call; does not wait."""
        with self._lock:
            error, self._error = self._error, None
        return error

    def close(self) -> None:
        """Wait for the write in progress, and release the buffers."""
        self._join()
        self._buffers = {}

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, encoded: EncodedCheckpoint, is_best: bool) -> None:
        _lower_priority()
        error: CheckpointError | None = None
        try:
            self.folder.write_encoded(encoded, is_best=is_best)
        except CheckpointError as found:
            error = found
        except Exception as found:  # Nobody would see it in this thread.
            error = unexpected_error(found, encoded.info.step)
        with self._lock:
            self._last_failed = error is not None
            self._error = error or self._error


def unexpected_error(error: Exception, step: int) -> CheckpointError:
    """Return the error for a checkpoint that could not be written for a reason that nothing else explains."""
    return CheckpointError(
        f"the checkpoint of step {step} could not be written: {type(error).__name__}: {error}.",
        detail="".join(traceback.format_exception(error)),
    )


def _lower_priority() -> None:
    """Let training have the cores first. On Linux, a priority belongs to a thread."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)


def _copied(tensors: TensorsByFile, buffers: TensorsByFile) -> TensorsByFile:
    """Copy tensors into buffers on the CPU, of which those that fit are used again."""
    copies: TensorsByFile = {}
    devices = set()
    for file, named in tensors.items():
        kept = buffers.get(file, {})
        copies[file] = {}
        for name, tensor in named.items():
            buffer = _fitting(kept.get(name), tensor)
            buffer.copy_(tensor.detach(), non_blocking=buffer.is_pinned())
            copies[file][name] = buffer
            devices.add(tensor.device)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return copies


def _fitting(buffer: Tensor | None, tensor: Tensor) -> Tensor:
    """Return the buffer if it has the shape and dtype of a tensor, else a new one."""
    if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
        return buffer
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    except (RuntimeError, MemoryError):
        raise CheckpointError(
            "there is not enough memory for a copy of the state, which asynchronous checkpoints need.",
            hint="write checkpoints synchronously",
        ) from None
