"""Number format and memory layout of a model in a run."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn

from paceline.config import RunConfig
from paceline.training.precision import storage_dtype

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Channels-last layout of a tensor, by its number of dimensions; weights of other layers have none."""


def move_model(model: nn.Module, config: RunConfig, device: torch.device) -> None:
    """Move a model to its device, in the number format and memory layout of a run.

    `model.to(memory_format=…)` would take one layout for all weights, and raise for those of the other number of
    dimensions.
    """
    model.to(device, storage_dtype(config.precision))
    if config.channels_last:
        for tensor in chain(model.parameters(), model.buffers()):
            if tensor.dim() in _CHANNELS_LAST:
                tensor.data = tensor.data.to(memory_format=_CHANNELS_LAST[tensor.dim()])
