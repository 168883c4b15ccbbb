"""Bilinear up-scaling that returns the same bytes on every machine.

Ranks on different hosts must have the same images, but processors add floats in different orders. Here every product
and sum is exact in float32: grid values are whole numbers below 2^11 and weights are multiples of 1/64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_WEIGHT_STEPS = 64


def upscale(grid: npt.NDArray[np.float32], height: int, width: int) -> npt.NDArray[np.float32]:
    """Scale whole numbers [..., h, w] up to [..., height, width], with pixel centres aligned as in image viewers."""
    *_, rows, columns = grid.shape
    weights = np.kron(_weights(rows, height), _weights(columns, width))
    flat = grid.reshape(-1, rows * columns) @ weights.T
    return flat.reshape(*grid.shape[:-2], height, width)


def _weights(size_in: int, size_out: int) -> npt.NDArray[np.float32]:
    """Return the weight of each input for each output, [size_out, size_in]; the edge value continues outwards."""
    centres = (np.arange(size_out) + 0.5) * size_in / size_out - 0.5
    centres = np.round(centres.clip(0, size_in - 1) * _WEIGHT_STEPS) / _WEIGHT_STEPS
    weights: npt.NDArray[np.float32] = np.maximum(0, 1 - np.abs(centres[:, None] - np.arange(size_in))).astype(
        np.float32
    )
    return weights
