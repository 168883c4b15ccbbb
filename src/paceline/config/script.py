"""`Script`: a user's training script that calls `paceline.attach`, and the settings that apply to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config.run import RunConfig
from paceline.config.setting import select

ATTACH_SETTINGS = select(RunConfig, lambda metadata: metadata.script == "attach")
"""Settings that are arguments of `attach`."""
SCRIPT_SETTINGS = select(RunConfig, lambda metadata: metadata.script != "own")
"""Settings that apply to a script."""
VARIED_IN_SCRIPTS = select(RunConfig, lambda metadata: metadata.script in ("varied", "attach"))
"""Settings that `--vary` accepts with a script."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """A user's training script, which calls `paceline.attach` in its own loop."""

    path: str
    args: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    """Settings of `RunConfig` given on the command line; they override what the script passes to `attach`."""

    @property
    def name(self) -> str:
        """File name of the script."""
        return Path(self.path).name

    def settings_to_keep(self, config: RunConfig) -> dict[str, Any]:
        """Return the settings to record; all others are set by the script itself."""
        return {
            "workload": self.name,
            "script": self.path,
            "args": list(self.args),
            **{name: getattr(config, name) for name in ("strategy", *SCRIPT_SETTINGS)},
        }
