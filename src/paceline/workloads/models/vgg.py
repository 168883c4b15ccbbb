"""VGG-11 with BatchNorm, the CIFAR variant: one linear layer after the convolutions, 9,231,114 parameters.

Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition", 2015, configuration A.
"""

from __future__ import annotations

from torch import nn

from paceline.errors import UsageError

_STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))


def vgg11(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Return five stages of 3×3 convolutions, each followed by 2×2 pooling, then the mean over the remaining pixels."""
    channels, height, width = shape
    if min(height, width) < 2 ** len(_STAGES):
        raise UsageError(f"vgg11 cannot process images of {height}×{width}.", hint="use images of 32×32 or larger")
    layers: list[nn.Module] = []
    for stage in _STAGES:
        for width_out in stage:
            layers += [nn.Conv2d(channels, width_out, 3, padding=1), nn.BatchNorm2d(width_out), nn.ReLU(inplace=True)]
            channels = width_out
        layers.append(nn.MaxPool2d(2))
    if (height, width) != (32, 32):
        layers.append(nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, classes))
