"""Configuration: what is trained and how, on which hosts, and what is measured. Free of torch.

The command line, a TOML file and the Python API build the same dataclasses. A field's docstring is its help text on the
command line, its name (with dashes) the option, and its name (with underscores) the key in a TOML file.
"""

from paceline.config.compare import CompareConfig
from paceline.config.launch import LaunchConfig, launched
from paceline.config.run import (
    ENDLESS,
    EXAMINED_SETTINGS,
    Backend,
    BatchNormMode,
    Device,
    Precision,
    RunConfig,
    step_range,
)
from paceline.config.scale import SCALING_MODES, ScaleConfig
from paceline.config.script import ATTACH_SETTINGS, SCRIPT_SETTINGS, Script

__all__ = [
    "ALTERNATIVES",
    "ATTACH_SETTINGS",
    "ENDLESS",
    "EXAMINED_SETTINGS",
    "SCALING_MODES",
    "SCRIPT_SETTINGS",
    "Backend",
    "BatchNormMode",
    "CompareConfig",
    "Device",
    "LaunchConfig",
    "Precision",
    "RunConfig",
    "ScaleConfig",
    "Script",
    "launched",
    "step_range",
]

ALTERNATIVES = (("batch", "batch_per_rank"), ("ranks", "ranks_per_host"))
"""Pairs of options that set the same value; giving one clears the other."""
