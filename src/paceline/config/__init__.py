"""Configuration: what is trained and how, on which hosts, and what is measured. Free of torch.

The command line, a TOML file and the Python API build the same dataclasses. A field's docstring is its help text on the
command line, its name (with dashes) the option, and its name (with underscores) the key in a TOML file. Its metadata
(`setting.Setting`) say how the rest of Paceline treats it.
"""

from paceline.config.batch import BatchConfig
from paceline.config.compare import CompareConfig
from paceline.config.large_batch import LargeBatchConfig
from paceline.config.launch import LaunchConfig, launched
from paceline.config.points import PointsConfig
from paceline.config.race import RaceConfig
from paceline.config.recipe import Precision, Recipe
from paceline.config.run import (
    DEFAULT_STRATEGY,
    ENDLESS,
    EXAMINED_SETTINGS,
    HANG_TIMEOUT_S,
    LENGTH_SETTINGS,
    Backend,
    BatchNormMode,
    Device,
    NoiseScaleMode,
    OnNan,
    ReplicaGuardMode,
    RunConfig,
    group_timeout_s,
    settings_unused_by,
    step_range,
)
from paceline.config.scale import SCALING_MODES, ScaleConfig
from paceline.config.script import ATTACH_SETTINGS, SCRIPT_SETTINGS, VARIED_IN_SCRIPTS, Script

__all__ = [
    "ATTACH_SETTINGS",
    "DEFAULT_STRATEGY",
    "ENDLESS",
    "EXAMINED_SETTINGS",
    "HANG_TIMEOUT_S",
    "LENGTH_SETTINGS",
    "SCALING_MODES",
    "SCRIPT_SETTINGS",
    "VARIED_IN_SCRIPTS",
    "Backend",
    "BatchConfig",
    "BatchNormMode",
    "CompareConfig",
    "Device",
    "LargeBatchConfig",
    "LaunchConfig",
    "NoiseScaleMode",
    "OnNan",
    "PointsConfig",
    "Precision",
    "RaceConfig",
    "Recipe",
    "ReplicaGuardMode",
    "RunConfig",
    "ScaleConfig",
    "Script",
    "group_timeout_s",
    "launched",
    "settings_unused_by",
    "step_range",
]
