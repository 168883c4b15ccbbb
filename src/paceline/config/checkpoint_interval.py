"""CheckpointInterval between two checkpoints: a number of steps, a time of training, or an epoch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.config.whole_number import whole_number
from paceline.errors import UsageError

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([smh])", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInterval:
    """Exactly one of the three is set."""

    steps: int | None = None
    seconds: float | None = None
    epochs: int | None = None

    @classmethod
    def parse(cls, text: str, option: str) -> CheckpointInterval:
        """Parse `100`, `30s`, `10m`, `1h` or `epoch`; raise a `UsageError` that names the option otherwise."""
        if text == "epoch":
            return cls(epochs=1)
        if steps := whole_number(text):
            return cls(steps=steps)
        time = _TIME.fullmatch(text)
        if time is not None and float(time[1]) > 0:
            return cls(seconds=float(time[1]) * _UNITS_S[time[2]])
        raise UsageError(
            f"{option} is {text!r}.",
            hint="write a number of steps (100), a time (30s, 10m, 1h), or epoch",
        )
