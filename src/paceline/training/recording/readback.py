"""Read numbers that steps have left on a GPU in few transfers."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def read_numbers(values: Sequence[Tensor | float]) -> list[float]:
    """Return values as Python numbers; tensors have one element each, and their device has already computed them.

    Tensors on a GPU are copied together, with one transfer per device and dtype, so each number keeps its exact value.
    `item()` would wait for a transfer per tensor. The transfers have a stream of their own, so they do not wait for
    later steps that are already queued.
    """
    if not (values and isinstance(values[0], Tensor) and values[0].is_cuda):  # On CPUs; rarely a mixture, also correct.
        return [value.item() if isinstance(value, Tensor) else value for value in values]
    on_gpu: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    numbers: list[float] = []
    for place, value in enumerate(values):
        if type(value) is Tensor and value.is_cuda:  # Other types of tensors may not be stacked.
            on_gpu.setdefault((value.device, value.dtype), []).append(place)
            numbers.append(0)
        else:
            numbers.append(value.item() if isinstance(value, Tensor) else value)
    for (device, _), places in on_gpu.items():
        with torch.cuda.stream(_transfer_stream(device)):
            copied = torch.stack([values[place].reshape(()) for place in places]).tolist()  # type: ignore[union-attr]
        for place, number in zip(places, copied, strict=True):
            numbers[place] = number
    return numbers


@functools.cache
def _transfer_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
