"""Number formats of a run: dtype of weights and inputs, autocast of the forward pass, and scaling of the loss.

The functions take the setting of a run, which is None, for fp32, until the recipe is known.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.amp import GradScaler

from paceline.config import OnNan, Precision
from paceline.strategies.base.scaling import StepSkipper

AUTOCAST_TYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Data type that autocast computes in, of the precisions that use it."""


def storage_dtype(precision: Precision | None) -> torch.dtype:
    """Return the dtype of weights, gradients and inputs: float32 under bf16 and fp16 too, which only autocast uses."""
    return torch.float64 if precision == "fp64" else torch.float32


def autocast(
    precision: Precision | None, device: torch.device, *, keeps_casts: bool = True
) -> AbstractContextManager[Any]:
    """Return the context for the forward pass: autocast under bf16 and fp16, otherwise none.

    `keeps_casts` is whether a weight that is used twice is cast once; a CUDA graph must contain every cast.
    """
    if precision not in AUTOCAST_TYPES:
        return nullcontext()
    return torch.autocast(device.type, AUTOCAST_TYPES[precision], cache_enabled=keeps_casts)


def set_matmul_precision(precision: Precision | None, device: torch.device) -> None:
    """Set the precision of float32 matrix products on a GPU: TF32 beside autocast, otherwise all bits."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision in AUTOCAST_TYPES else "highest")


def make_scaler(precision: Precision | None, device: torch.device, on_nan: OnNan = "stop") -> GradScaler | None:
    """Return the scaler of the loss under fp16, where small gradients would be rounded to zero.

    In other precisions it is one that only skips steps whose gradients are not finite, or None if none is skipped.
    """
    if precision == "fp16":
        return GradScaler(device.type)
    return StepSkipper(device.type) if on_nan == "skip" else None
