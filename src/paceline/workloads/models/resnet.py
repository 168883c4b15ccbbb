"""ResNet-18, the CIFAR variant: a 3×3 stem without pooling, 11,173,962 parameters.

He et al., "Deep residual learning for image recognition", 2016; the stem is that of their section 4.2 for CIFAR-10.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def resnet18(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Return four stages of two basic blocks, with 64 to 512 channels."""
    stages, channels = list[nn.Module](), 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        stages += [BasicBlock(channels, width, stride), BasicBlock(width, width, 1)]
        channels = width
    return nn.Sequential(
        nn.Conv2d(shape[0], 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, classes),
    )


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut around them."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the convolutions' output and the shortcut's."""
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x), inplace=True)
