"""What can be known of a workload's name without importing torch."""

from __future__ import annotations

MODEL_NAMES = ("cnn", "vgg11", "resnet18")


def is_user_workload(workload: str) -> bool:
    """Whether a workload is the user's own, `module:function`."""
    return ":" in workload
