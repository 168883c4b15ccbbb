"""The number formats of a run: what weights and inputs are kept in, and what the forward pass computes in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from paceline.config import Precision


def storage_dtype(precision: Precision) -> torch.dtype:
    """What weights, gradients and inputs are kept in: under bf16 too that is float32, and only products are bf16."""
    return torch.float64 if precision == "fp64" else torch.float32


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Goes around the forward pass."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()
