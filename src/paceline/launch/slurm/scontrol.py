"""Slurm's own description of nodes and jobs, from `scontrol`. Free of torch."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

_TIMEOUT_S = 20.0


def scontrol(*arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the output of `scontrol ARGUMENTS`; empty if the program is missing or does not answer."""
    try:
        done = subprocess.run(
            ["scontrol", *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env=None if environment is None else dict(environment),
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
