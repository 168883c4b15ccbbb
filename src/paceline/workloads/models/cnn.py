"""Small convolutional network without BatchNorm: 53,762 parameters for 3×32×32 images and 10 classes."""

from __future__ import annotations

from torch import nn

from paceline.errors import UsageError


def cnn(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Return 5×5 convolutions of 6 and 16 channels (the second padded by 2) with 2×2 pooling, then 64 hidden units."""
    channels, height, width = shape
    pooled = ((height - 4) // 4, (width - 4) // 4)
    if min(pooled) < 1:
        raise UsageError(f"cnn cannot process images of {height}×{width}.", hint="use images of 8×8 or larger")
    return nn.Sequential(
        nn.Conv2d(channels, 6, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * pooled[0] * pooled[1], 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )
