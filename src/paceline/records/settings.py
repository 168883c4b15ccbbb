"""Settings in a record: those of a run, those that all runs of an experiment share, those of a candidate.

They stay a mapping. A record of a script has only the settings that apply to scripts, an experiment has only the shared
ones, and readers compare them key by key. `RunConfig` defines the type of each value.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.config import RunConfig
from paceline.errors import RecordError
from paceline.records.decoder import convert

Settings = dict[str, Any]
SettingValue = None | bool | int | float | str | list[str]
"""Value of a setting that `RunConfig` does not define: of another version, or of the launcher."""
SCRIPT_TYPES = {"script": str, "args": list[str]}
"""Types of the settings in the record of a script that `RunConfig` lacks."""


def check_settings(settings: Settings, name: str, file: Path, needed: Iterable[str] = ()) -> None:
    """Raise `RecordError` if a setting is missing or has a type that `RunConfig` does not allow."""
    for key in needed:
        if key not in settings:
            raise RecordError(f"{file} is damaged: {name} has no {key}.")
    for key, value in settings.items():
        convert(value, _types().get(key, SettingValue), f"{name}.{key}", file)


@functools.cache
def _types() -> dict[str, Any]:
    """Return the types of the known settings."""
    return typing.get_type_hints(RunConfig) | SCRIPT_TYPES
