"""What can be known of a workload's name without importing torch."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

MODEL_NAMES = ("cnn", "vgg11", "resnet18")


def find_own_module(name: str) -> bool:
    """Whether the user's module can be imported; looks in the current folder first, as `python -m` would."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return importlib.util.find_spec(name) is not None


def is_own(workload: str) -> bool:
    """Whether a workload is the user's own, `module:function`."""
    return ":" in workload
