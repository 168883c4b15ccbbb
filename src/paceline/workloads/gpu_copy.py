"""Copies of a user's data to a GPU: the whole data set if it is small, otherwise batch by batch, beside the training.

A copy from ordinary memory makes the host wait until the GPU has done all earlier work, so that the GPU then runs out
of work. One from page-locked memory does not. It is made in a stream of its own: while the GPU trains a step, it
receives the batch of the next one, which the host has read meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

MEMORY_SHARE = 0.25
"""Largest share of the GPU's free memory that a data set may take; the rest is for the model."""


def fits_on_gpu(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Return whether all samples can stay on the GPU, so that no step has to copy any."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    free, _ = torch.cuda.mem_get_info(device)
    return size <= MEMORY_SHARE * free


def copy_to_gpu(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the GPU, which the current stream may use; the host does not wait for it."""
    stream, current = _copy_stream(device), torch.cuda.current_stream(device)
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    with torch.cuda.stream(stream):
        copied = pinned.to(device, non_blocking=True)
    current.wait_stream(stream)
    copied.record_stream(current)  # Its memory is not given to another tensor before the current stream has read it.
    return copied


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
