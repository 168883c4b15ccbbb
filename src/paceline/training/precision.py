"""Number formats of a run: dtype of weights and inputs, and autocast of the forward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from paceline.config import Precision


def storage_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype of weights, gradients and inputs: float32 under bf16 too, where only autocast uses bfloat16."""
    return torch.float64 if precision == "fp64" else torch.float32


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context for the forward pass: autocast to bfloat16 under bf16, otherwise none."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()
