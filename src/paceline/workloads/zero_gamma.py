"""Zero-gamma: residual blocks that start as the identity.

Goyal et al., "Accurate, large minibatch SGD", 2017, section 5.1.
"""

from __future__ import annotations

from torch import nn

from paceline.errors import UsageError

SHORTCUT_NAMES = ("shortcut", "downsample")
"""Attributes by which a module is recognised as a residual block, in Paceline's and in torchvision's models."""


def zero_gamma(model: nn.Module) -> None:
    """Set the weight of the last BatchNorm of each residual block to 0."""
    last = last_norms(model)
    if not last:
        raise UsageError(
            "zero-gamma was asked for, but the model has no residual block that ends in a BatchNorm.",
            hint=f"leave it out; a block is recognised by its attribute {' or '.join(SHORTCUT_NAMES)}",
        )
    for norm in last:
        nn.init.zeros_(norm.weight)


def last_norms(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """Return the last BatchNorm of each residual block."""
    blocks = [module for module in model.modules() if any(hasattr(module, name) for name in SHORTCUT_NAMES)]
    return [norm for block in blocks if (norm := _last_norm(block)) is not None]


def _last_norm(block: nn.Module) -> nn.modules.batchnorm._BatchNorm | None:
    """Return the last BatchNorm with a weight among the children of a block, in the order of its definition."""
    children = [child for name, child in block.named_children() if name not in SHORTCUT_NAMES]
    norms = [
        module
        for child in children
        for module in child.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.weight is not None
    ]
    return norms[-1] if norms else None
