"""Names of workloads, checked without importing torch."""

from __future__ import annotations

MODEL_NAMES = ("cnn", "vgg11", "resnet18")
RESIDUAL_MODELS = ("resnet18",)
"""Built-in models with residual blocks."""


def is_user_workload(workload: str) -> bool:
    """Whether a workload is a user's, written `module:function`."""
    return ":" in workload
