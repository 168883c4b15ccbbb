"""Built-in models of images, each a function of the shape (channels, height, width) and the number of classes."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from paceline.workloads.models.cnn import cnn
from paceline.workloads.models.resnet import resnet18
from paceline.workloads.models.vgg import vgg11

MODELS: dict[str, Callable[[tuple[int, int, int], int], nn.Module]] = {
    "cnn": cnn,
    "vgg11": vgg11,
    "resnet18": resnet18,
}

__all__ = ["MODELS"]
